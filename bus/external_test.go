package bus_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
)

// TestExternalConfig runs an ordinary nats-server with what ExternalConfig
// prints, as docs/events.md tells users to.
func TestExternalConfig(t *testing.T) { // SEC-2
	ca := identitytest.New(t)
	main := ca.Controller(t)
	writer := ca.Identity(t, identity.RoleController, identity.StoreName().ID)
	a := ca.Node(t, "a", identity.Grant{"shop"})
	sub := ca.Identity(t, identity.RoleSubscriber, "s")
	gone := ca.Identity(t, identity.RoleRelay, "gone")
	_, err := ca.Revoke(gone.Name())
	require.NoError(t, err)
	text, err := bus.ExternalConfig(ca.Members())
	require.NoError(t, err)
	require.NotContains(t, text, "gone")

	text += fmt.Sprintf("listen: \"127.0.0.1:-1\"\njetstream { store_dir: %q }\n"+
		"tls { cert_file: %q, key_file: %q, ca_file: %q, verify_and_map: true, min_version: \"1.3\" }\n",
		t.TempDir(), main.CertFile(), main.KeyFile(), main.CAFile())
	opts := &server.Options{NoSigs: true, NoLog: true}
	require.NoError(t, opts.ProcessConfigString(text))
	ns, err := server.NewServer(opts)
	require.NoError(t, err)
	ns.Start()
	t.Cleanup(func() { ns.Shutdown(); ns.WaitForShutdown() })
	require.True(t, ns.ReadyForConnections(soon))

	connect := func(i *identity.Identity) bus.Config {
		return bus.Config{URLs: []string{ns.ClientURL()}, Identity: i, Logger: bustest.Logger(t)}
	}
	open := func(i *identity.Identity) *bus.Conn {
		c, err := bus.Connect(connect(i))
		require.NoError(t, err)
		t.Cleanup(c.Close)
		require.Eventually(t, c.Connected, soon, poll)
		return c
	}
	controller := open(main)
	store, err := bus.OpenStore(connect(writer))
	require.NoError(t, err)
	t.Cleanup(store.Close)
	require.NoError(t, bus.EnsureStreams(t.Context(), controller))
	require.NoError(t, store.Ensure(t.Context()))
	require.NoError(t, store.Put(t.Context(), bus.BucketRelays, "r", []byte("{}")))

	node := open(a)
	publish(t, node, event("shop", "a", 1, true))
	ctx, cancel := context.WithTimeout(t.Context(), soon/10)
	defer cancel()
	require.Error(t, node.PublishPlacement(ctx, event("bank", "a", 1, true)))
	relays, err := node.ReadBucket(t.Context(), bus.BucketRelays)
	require.NoError(t, err)
	require.Contains(t, relays, "r")
	require.NoError(t, store.KeepDesired(t.Context(), "a", map[string]placement.Desired{"web": desired("web", "a", 1)}))
	require.NoError(t, store.KeepDesired(t.Context(), "b", map[string]placement.Desired{"web": desired("web", "b", 1)}))
	var own wanted
	bustest.Go(t, func(ctx context.Context) error { return node.FollowDesired(ctx, own.set) })
	require.Eventually(t, func() bool { return own.is(map[string]uint64{"web": 1}) }, soon, poll)
	raw := dialAt(t, ns.ClientURL(), a)
	for _, s := range []string{"opfield.read.KV_opfield_desired.b.web", "opfield.read.KV_opfield_desired", "opfield.report.v1.node.b"} {
		raw.refusedPublish(t, s, nil)
	}
	raw.refusedSubscribe(t, "opfield.kv.opfield_desired.b.web")
	var seen fold
	s := open(sub)
	bustest.Go(t, func(ctx context.Context) error { return s.FollowPlacements(ctx, seen.add) })
	require.Eventually(t, func() bool { return seen.counter("shop", "a") == 1 }, soon, poll)

	c, err := bus.Connect(connect(gone))
	require.NoError(t, err)
	defer c.Close()
	require.Never(t, c.Connected, soon/10, poll)
}
