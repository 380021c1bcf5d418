package bus_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
)

func auditLog(t *testing.T, srv *bustest.Server, queue int) (*bus.AuditLog, *prometheus.Registry) {
	t.Helper()
	reg := prometheus.NewRegistry()
	log, err := bus.NewAuditLog(bus.AuditConfig{Store: srv.Store, Queue: queue, Logger: bustest.Logger(t), Registerer: reg})
	require.NoError(t, err)
	return log, reg
}

// dropped returns the events that were not stored, by reason.
func dropped(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	all, err := reg.Gather()
	require.NoError(t, err)
	out := map[string]float64{}
	for _, f := range all {
		if f.GetName() == "opfield_audit_dropped_total" {
			for _, m := range f.GetMetric() {
				out[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
			}
		}
	}
	return out
}

func texts(p bus.AuditPage) []string {
	var out []string
	for _, m := range p.Events {
		out = append(out, m.Data.Text)
	}
	return out
}

func TestAudit_StoredInOrderAndRead(t *testing.T) { // OBS-2
	srv := bustest.Start(t, identitytest.New(t))
	log, _ := auditLog(t, srv, 0)
	bustest.Go(t, log.Run)
	begin := time.Now()
	for i := range 3 {
		log.Add(bus.AuditEvent{Kind: bus.AuditStep, Workload: "shop", Node: "a", Text: fmt.Sprint("step ", i)})
	}
	log.Add(bus.AuditEvent{Kind: bus.AuditRefused, Workload: "not a name.>", Text: strings.Repeat("ä", 4000), Path: strings.Repeat("x", 4000)})
	read := func(q bus.AuditQuery, wait time.Duration) bus.AuditPage {
		t.Helper()
		p, err := srv.Controller.ReadAudit(t.Context(), q, wait)
		require.NoError(t, err)
		return p
	}
	require.Eventually(t, func() bool { return len(read(bus.AuditQuery{}, 0).Events) == 4 }, soon, poll)
	all := read(bus.AuditQuery{}, 0)
	require.Equal(t, []string{"step 0", "step 1", "step 2"}, texts(all)[:3])
	require.False(t, all.More)
	require.Equal(t, "workload.shop", all.Events[0].Subject)
	refused := all.Events[3]
	require.Equal(t, "controller", refused.Subject, "a foreign text makes no subject")
	require.Empty(t, refused.Data.Workload)
	require.LessOrEqual(t, len(refused.Data.Text), 1024)

	first := read(bus.AuditQuery{Workload: "shop", Most: 2}, 0)
	require.Equal(t, []string{"step 0", "step 1"}, texts(first))
	require.True(t, first.More)
	require.Equal(t, []string{"step 2"}, texts(read(bus.AuditQuery{Workload: "shop", After: first.Next}, 0)))
	require.Len(t, read(bus.AuditQuery{Since: begin.Add(-time.Minute)}, 0).Events, 4)
	require.Empty(t, read(bus.AuditQuery{Since: time.Now().Add(time.Hour)}, 0).Events)
	require.Empty(t, read(bus.AuditQuery{Workload: "bank"}, 0).Events)

	// One who waits gets what comes.
	time.AfterFunc(100*time.Millisecond, func() { log.Add(bus.AuditEvent{Kind: bus.AuditTakeover, Text: "late"}) })
	begin = time.Now()
	require.Equal(t, []string{"late"}, texts(read(bus.AuditQuery{After: all.Next}, 10*time.Second)))
	require.Less(t, time.Since(begin), 5*time.Second)
	begin = time.Now()
	require.Empty(t, read(bus.AuditQuery{Workload: "bank"}, 200*time.Millisecond).Events)
	require.Less(t, time.Since(begin), 5*time.Second)
}

func TestAudit_NATSAway(t *testing.T) { // OBS-2
	srv := bustest.Start(t, identitytest.New(t))
	log, reg := auditLog(t, srv, 4)
	srv.Stop()
	begin := time.Now()
	for i := range 7 { // nobody takes them yet: four fit
		log.Add(bus.AuditEvent{Kind: bus.AuditStep, Text: fmt.Sprint(i)})
	}
	require.Less(t, time.Since(begin), time.Second, "it blocks nobody")
	require.Equal(t, map[string]float64{"full": 3, "refused": 0, "stopped": 0}, dropped(t, reg))
	bustest.Go(t, log.Run)
	srv.Start()
	var p bus.AuditPage
	require.Eventually(t, func() bool {
		var err error
		p, err = srv.Controller.ReadAudit(t.Context(), bus.AuditQuery{}, 0)
		return err == nil && len(p.Events) == 4
	}, soon, poll)
	require.Equal(t, []string{"0", "1", "2", "3"}, texts(p), "each once, in order")
}

func TestAudit_EndOfTheProcess(t *testing.T) {
	srv := bustest.Start(t, identitytest.New(t))
	log, _ := auditLog(t, srv, 0)
	for i := range 20 {
		log.Add(bus.AuditEvent{Kind: bus.AuditStep, Text: fmt.Sprint(i)})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, log.Run(ctx), context.Canceled)
	p, err := srv.Controller.ReadAudit(t.Context(), bus.AuditQuery{}, 0)
	require.NoError(t, err)
	require.Len(t, p.Events, 20, "what waits is stored first")
}

func TestAudit_NobodyElse(t *testing.T) { // OBS-2, SEC-2
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	log, _ := auditLog(t, srv, 0)
	bustest.Go(t, log.Run)
	log.Add(bus.AuditEvent{Kind: bus.AuditTakeover, Text: "true"})
	require.Eventually(t, func() bool {
		p, err := srv.Controller.ReadAudit(t.Context(), bus.AuditQuery{}, 0)
		return err == nil && len(p.Events) == 1
	}, soon, poll)
	for _, role := range []identity.Role{identity.RoleNode, identity.RoleIngress, identity.RoleRelay, identity.RoleSubscriber} {
		p := dial(t, srv, ca.Identity(t, role, "x"))
		for _, s := range []string{"opfield.audit.v1.controller", "opfield.audit.v1.workload.shop", "opfield.read.OPFIELD_AUDIT", "$JS.API.DIRECT.GET.OPFIELD_AUDIT", "$JS.API.STREAM.PURGE.OPFIELD_AUDIT"} {
			p.refusedPublish(t, s, []byte(`{"seq":1,"next_by_subj":">","batch":9}`))
		}
		p.refusedSubscribe(t, "opfield.audit.v1.>")
	}
	// The controller's own name in the other account writes nothing either.
	main := dial(t, srv, srv.Identity)
	require.NoError(t, main.Publish("opfield.audit.v1.controller", []byte(`{}`)))
	require.NoError(t, main.Flush())
	// And nobody takes anything out of it.
	store := dial(t, srv, ca.Identity(t, identity.RoleController, identity.StoreName().ID))
	js, err := jetstream.New(store.Conn)
	require.NoError(t, err)
	stream, err := js.Stream(t.Context(), "OPFIELD_AUDIT")
	require.NoError(t, err)
	require.Error(t, stream.Purge(t.Context()))
	require.Error(t, stream.DeleteMsg(t.Context(), 1))
	info, err := stream.Info(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, info.State.Msgs)
	require.Equal(t, 90*24*time.Hour, info.Config.MaxAge)
	require.False(t, info.Config.AllowRollup)
}
