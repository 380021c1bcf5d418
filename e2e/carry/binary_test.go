package carry_test

import (
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
)

// forward lets the processes of a host reach an address of the test.
func forward(t *testing.T, h *lab.Host, listen, to string) {
	t.Helper()
	ln, err := h.Listen("tcp", listen)
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
				go func() {
					_, _ = io.Copy(pair[0], pair[1])
					pair[0].Close()
				}()
			}
		}
	}()
}

// The real agent over a real NATS: inspected, desired, reported, and on its
// own while NATS is away.
func TestNodeProcess(t *testing.T) { // ENA-2, RDY-4, MOD-4, SEC-2
	env := lab.New(t)
	n := env.Node("node-1")
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	forward(t, n.Host, "127.0.0.1:4222", strings.TrimPrefix(srv.URL(), "tls://"))
	id := ca.Identity(t, identity.RoleNode, "node-1")
	agent := n.Start("opfield-node", env.Binary("./cmd/opfield-node"), "run", "--identity-dir", id.Dir(), "--state-dir", n.Path("state"),
		"--docker", n.Socket(), "--nats", "tls://127.0.0.1:4222")

	var mu sync.Mutex
	var last placement.NodeReport
	bustest.Go(t, func(ctx context.Context) error {
		return srv.Controller.FollowReports(ctx, func(r placement.NodeReport) {
			mu.Lock()
			defer mu.Unlock()
			last = r
		})
	})
	observed := func() placement.Observed {
		mu.Lock()
		defer mu.Unlock()
		for _, o := range last.Placements {
			if o.Workload == "web" {
				return o
			}
		}
		return placement.Observed{}
	}
	w := &world{t: t, env: env, Node: n}
	web := w.plain("web", func(_ *container.Config, h *container.HostConfig) {
		h.RestartPolicy.Name = container.RestartPolicyAlways
	})
	var c placement.Captured
	env.Await(20*time.Second, "the node answers an inspection", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		found, err := srv.Controller.Inspect(ctx, "node-1", "web")
		c = found
		return err == nil
	})
	require.Equal(t, web.ID(), c.ID)
	_, err := srv.Controller.Inspect(t.Context(), "node-1", "nobody")
	require.ErrorIs(t, err, bus.ErrInspect)

	d := placement.Desired{
		Workload: "web", Node: "node-1", Kind: placement.KindContainer, Revision: 1, Generation: 1, Want: placement.WantServing,
		Original: true, Adopt: c.ID, AdoptedAt: 1, Container: "web", Spec: c.Spec, DrainSeconds: 1,
		Ports: []placement.Port{{Port: 8080, Protocol: placement.ProtocolHTTP}},
	}
	keep := func() {
		t.Helper()
		require.NoError(t, srv.Store.KeepDesired(t.Context(), "node-1", map[string]placement.Desired{"web": d}))
	}
	keep()
	env.Await(20*time.Second, "reported as serving", func() bool { o := observed(); return o.Done && o.Revision == 1 && o.Ready })
	e, found, err := srv.Controller.LastPlacement(t.Context(), d.ID())
	if err == nil && found {
		require.EqualValues(t, 1, e.Generation)
	}
	mu.Lock()
	require.NotEmpty(t, last.Facts.Registry, "there is no relay")
	require.Equal(t, "linux", last.Facts.OS)
	mu.Unlock()

	// NATS goes, the agent is killed, the container ends: it comes back.
	srv.Stop()
	agent.Kill()
	require.NoError(t, n.Docker().ContainerKill(t.Context(), "web", "KILL"))
	agent.Start()
	env.Await(20*time.Second, "started without NATS", func() bool { return w.inspect("web").State.Running })
	require.Equal(t, container.RestartPolicyDisabled, w.inspect("web").HostConfig.RestartPolicy.Name)
	srv.Start()
	env.Await(20*time.Second, "the store answers", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		d.Revision, d.Want = 2, placement.WantStopped
		return srv.Store.KeepDesired(ctx, "node-1", map[string]placement.Desired{"web": d}) == nil
	})
	env.Await(40*time.Second, "stopped and reported", func() bool {
		o := observed()
		return o.Done && o.Revision == 2 && o.State == placement.StateStopped
	})
	require.Equal(t, []string{"web exited"}, w.containers())
}
