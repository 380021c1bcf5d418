package engine_test

import (
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/policy"
	"github.com/opfield/availability/policy/engine"
	"github.com/opfield/availability/policy/engine/enginetest"
)

// record keeps audit events.
type record struct {
	mu     sync.Mutex
	events []bus.AuditEvent
}

func (r *record) add(e bus.AuditEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

// of returns the texts of one kind that are about a workload.
func (r *record) of(kind bus.AuditKind, workload string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for _, e := range r.events {
		if e.Kind == kind && e.Workload == workload {
			out = append(out, e.Text)
		}
	}
	return out
}

func TestEngine_Audit(t *testing.T) { // OBS-2
	c := enginetest.New(t, 3)
	audit := &record{}
	k := c.Start(func(cfg *engine.Config) { cfg.Audit, cfg.Instance = audit.add, "first" })
	awaitLead(t, k, soon)
	require.Equal(t, []string{"controller first decides about policies from now on"}, audit.of(bus.AuditTakeover, ""))
	enabled(t, c, k, "node-1", failover(), "web")
	require.Contains(t, audit.of(bus.AuditOperation, "web"), "enable completed: ")

	// What it does by itself.
	c.Lose(c.Node("node-1"))
	require.True(t, until(soon, func() bool { return len(history(t, k, "web", policy.Heal)) == 1 }))
	steps := audit.of(bus.AuditStep, "web")
	require.Contains(t, steps, "node node-1 is lost")
	require.True(t, slices.Contains(steps, "start on node-2, generation 1") || slices.Contains(steps, "start on node-3, generation 1"), steps)
	require.Contains(t, audit.of(bus.AuditOperation, "web"), "heal: node node-1 is lost")

	// The end of a policy is told with what led to it.
	survivor := c.Running("web")[0]
	_, err := k.Disable(t.Context(), "web", policy.DisableRequest{Survivor: survivor, Confirm: "web"})
	require.NoError(t, err)
	c.Node("node-1").Boot()
	c.Fleet.Set("node-1", policy.NodeOnline)
	require.True(t, until(soon, func() bool { return len(audit.of(bus.AuditEnded, "web")) == 1 }))
	require.Contains(t, audit.of(bus.AuditStep, "web"), "nothing is left to do on "+survivor)

	// Another controller takes over.
	other := c.Start(func(cfg *engine.Config) { cfg.Audit, cfg.Instance = audit.add, "second" })
	k.Stop()
	awaitLead(t, other, soon)
	require.Len(t, audit.of(bus.AuditTakeover, ""), 2)
}
