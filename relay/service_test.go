package relay

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

// controller runs the accepting end of service/registry, whose connections
// are echoed, and returns its identity.
func (r *rig) controller(callers ...identity.Role) *identity.Identity {
	who := r.ca.Controller(r.t)
	service := securelink.NewService(securelink.ServiceConfig{
		Name: "registry", TLS: who.ServerTLS(callers...), Logger: slog.New(slog.DiscardHandler),
	})
	links := &securelink.LinkSet{}
	links.Set([]securelink.Record{service.Record()})
	r.t.Cleanup(func() { _ = service.Close() })
	go func() {
		for {
			c, err := service.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	r.run(identity.RoleController, "main", securelink.RelaysConfig{Links: links, Accept: service.Take})
	return who
}

func (r *rig) call(rs *securelink.Relays, as *identity.Identity, service string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, err := rs.DialService(ctx, service, as.ClientTLS(identity.ControllerName()))
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		return "", err
	}
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	buf := make([]byte, 5)
	_, err = io.ReadFull(c, buf)
	return string(buf), err
}

// RLY-1: a node reaches a service of the controller over the relay, beside
// the links of its own workloads.
func TestServer_ServiceLink(t *testing.T) {
	r := newRig(t, nil)
	r.controller(identity.RoleNode)
	nodeID := r.ca.Identity(t, identity.RoleNode, "node-1")
	node := r.node("node-1", webLink())
	var got string
	require.Eventually(t, func() bool {
		var err error
		got, err = r.call(node, nodeID, "registry")
		return err == nil
	}, 5*time.Second, 5*time.Millisecond)
	require.Equal(t, "hello", got)
	require.Eventually(t, func() bool { _, n := r.server.Status(); return n == 0 }, 5*time.Second, time.Millisecond)
	r.ready(r.ingress("ingress-1"), webLink()) // the node still takes streams

	_, err := r.call(node, nodeID, "database")
	require.ErrorContains(t, err, "not registered")
	_, err = node.DialService(t.Context(), "registry", nodeID.ClientTLS(identity.Name{Role: identity.RoleController, ID: "other"}))
	require.ErrorContains(t, err, "main.controller.opfield.internal", "who answers is verified end to end")
}

// SEC: who may open and register what.
func TestServer_ServiceLinkRefusals(t *testing.T) {
	r := newRig(t, nil)
	r.controller(identity.RoleNode)
	node := r.node("node-1", webLink())
	in := r.ingress("ingress-1")
	r.ready(in, webLink())

	_, err := r.open(node, webLink())
	require.ErrorContains(t, err, "unauthorised", "a node opens a link of a workload, if only its own")
	_, err = r.open(in, placement.ServiceLink("registry"))
	require.ErrorContains(t, err, "unauthorised", "an ingress node opens a service")

	for what, l := range map[Peer]placement.LinkID{
		{"node", "node-9"}:     placement.ServiceLink("registry"),
		{"controller", "main"}: {Placement: placement.ID{Workload: "web", Node: "main"}, Port: 80},
		{"node", "node-8"}:     webLink(),
	} {
		links := &securelink.LinkSet{}
		links.Set([]securelink.Record{{Link: l, Role: placement.RoleServing, State: placement.StateRunning, Ready: true}})
		rs := r.run(identity.Role(what.Role), what.ID, securelink.RelaysConfig{Links: links, Accept: func(in *securelink.Incoming) { in.Refuse(securelink.NotReady) }})
		require.Eventually(t, func() bool { return rs.Reachable() == 0 }, 5*time.Second, time.Millisecond, "%s registers %s", what, l)
		r.server.mu.Lock()
		e, ok := r.server.links[l]
		r.server.mu.Unlock()
		require.False(t, ok && e.s.peer == what, "%s registers %s", what, l)
	}
}

// A caller of another role is refused inside the link, whatever the relay
// lets through.
func TestServer_ServiceLinkVerifiesCaller(t *testing.T) {
	r := newRig(t, nil)
	r.controller(identity.RoleIngress)
	node := r.node("node-1", webLink())
	r.ready(r.ingress("ingress-1"), webLink())
	_, err := r.call(node, r.ca.Identity(t, identity.RoleNode, "node-1"), "registry")
	require.Error(t, err)
}

// An ingress node hears nothing of services.
func TestServer_ServiceLinkIsNotFollowed(t *testing.T) {
	r := newRig(t, nil)
	r.controller(identity.RoleNode)
	heard := &hearing{links: make(chan placement.LinkID, 16)}
	r.run(identity.RoleIngress, "ingress-1", securelink.RelaysConfig{Watcher: heard})
	r.controller(identity.RoleNode) // replaces the first: changes
	r.node("node-1", webLink())
	require.Equal(t, webLink(), <-heard.links)
}

type hearing struct {
	deaf
	links chan placement.LinkID
}

func (h *hearing) Up(_ string, _ time.Duration, links []securelink.Report, _ []securelink.NodeSession) {
	for _, l := range links {
		h.links <- l.Link
	}
}

func (h *hearing) Report(_ string, r securelink.Report) { h.links <- r.Link }
