package bus_test

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
)

// plain connects with the identity's certificate and no code of ours.
type plain struct {
	*nats.Conn
	denied chan error
}

func dial(t *testing.T, srv *bustest.Server, i *identity.Identity) plain {
	t.Helper()
	return dialAt(t, srv.URL(), i)
}

func dialAt(t *testing.T, url string, i *identity.Identity) plain {
	t.Helper()
	p := plain{denied: make(chan error, 100)}
	nc, err := nats.Connect(url, nats.Secure(i.ClientTLS(identity.ControllerName())),
		nats.CustomInboxPrefix("_INBOX."+string(i.Name().Role)+"."+i.Name().ID),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { p.denied <- err }))
	require.NoError(t, err)
	t.Cleanup(nc.Close)
	p.Conn = nc
	return p
}

func (p plain) refusedPublish(t *testing.T, subject string, data []byte) {
	t.Helper()
	require.NoError(t, p.Publish(subject, data))
	require.NoError(t, p.Flush())
	select {
	case err := <-p.denied:
		require.ErrorIs(t, err, nats.ErrPermissionViolation)
	case <-time.After(soon):
		t.Fatalf("publishing on %s was not refused", subject)
	}
}

func (p plain) refusedSubscribe(t *testing.T, subject string) {
	t.Helper()
	_, err := p.SubscribeSync(subject)
	require.NoError(t, err)
	require.NoError(t, p.Flush())
	select {
	case err := <-p.denied:
		require.ErrorIs(t, err, nats.ErrPermissionViolation)
	case <-time.After(soon):
		t.Fatalf("subscribing to %s was not refused", subject)
	}
}

func TestPermissions(t *testing.T) { // SEC-2
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	forged, err := event("shop", "b", 9, true).Marshal()
	require.NoError(t, err)

	node := dial(t, srv, ca.Node(t, "a", identity.Grant{"shop"}))
	for _, s := range []string{
		"opfield.placement.v1.shop.b", // another node
		"opfield.placement.v1.bank.a", // outside of its grant
		"opfield.node.v1.b",           // the controller's
		"opfield.status.v1.node.b",    // another's status
		"opfield.inventory.v1.node.b",
		"opfield.identity.v1.node.b",     // another's signing
		"$KV.opfield_routes.shop",        // a bucket
		"opfield.kv.opfield_routes.shop", // its announcement
		"opfield.read.KV_opfield_certs",  // secrets
		"opfield.read.KV_opfield_routes", //
		"$JS.API.STREAM.PURGE.OPFIELD_PLACEMENTS",
		"$JS.API.STREAM.DELETE.OPFIELD_PLACEMENTS",
		"$JS.API.CONSUMER.CREATE.OPFIELD_PLACEMENTS",
		"$JS.API.DIRECT.GET.OPFIELD_PLACEMENTS",
		"$SYS.REQ.SERVER.PING",
	} {
		node.refusedPublish(t, s, forged)
	}
	for _, s := range []string{"opfield.placement.v1.>", "opfield.kv.opfield_certs.>", "opfield.status.v1.>", "opfield.inventory.v1.>", ">", "_INBOX.>", "_INBOX.node.b.>", "$KV.>"} {
		node.refusedSubscribe(t, s)
	}

	sub := dial(t, srv, ca.Identity(t, identity.RoleSubscriber, "s"))
	for _, s := range []string{"opfield.placement.v1.shop.s", "opfield.status.v1.subscriber.s", "opfield.inventory.v1.subscriber.s", "$JS.API.DIRECT.GET.OPFIELD_PLACEMENTS", "opfield.read.KV_opfield_routes", "opfield.read.KV_opfield_certs", "$JS.API.CONSUMER.CREATE.OPFIELD_PLACEMENTS", "$JS.API.STREAM.MSG.DELETE.OPFIELD_PLACEMENTS"} {
		sub.refusedPublish(t, s, forged)
	}
	relay := dial(t, srv, ca.Identity(t, identity.RoleRelay, "r"))
	relay.refusedPublish(t, "opfield.read.KV_opfield_certs", []byte(`{"seq":1,"next_by_subj":">","batch":9}`))
	relay.refusedSubscribe(t, "opfield.kv.opfield_certs.>")

	main := dial(t, srv, srv.Identity) // not even the controller's own name writes buckets
	js, err := jetstream.New(main.Conn)
	require.NoError(t, err)
	_, err = js.KeyValue(t.Context(), bus.BucketRoutes)
	require.ErrorIs(t, err, jetstream.ErrBucketNotFound)
}

func TestPermissions_RollupAndForeignReply(t *testing.T) { // SEC-2
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	b := srv.Conn(t, ca.Identity(t, identity.RoleNode, "b"))
	bustest.Go(t, b.KeepPlacements)
	publish(t, b, event("shop", "b", 1, true))
	require.NoError(t, srv.Store.Put(t.Context(), bus.BucketRoutes, "shop", []byte("good")))
	require.NoError(t, srv.Store.Put(t.Context(), bus.BucketRelays, "r", []byte("good")))

	a := dial(t, srv, ca.Identity(t, identity.RoleNode, "a"))
	mine, err := event("shop", "a", 1, true).Marshal()
	require.NoError(t, err)
	for _, rollup := range []string{"all", "sub"} {
		msg := nats.NewMsg("opfield.placement.v1.shop.a")
		msg.Header.Set("Nats-Rollup", rollup)
		msg.Data = mine
		answer, err := a.RequestMsg(msg, soon)
		require.NoError(t, err)
		require.Contains(t, string(answer.Data), "error")
	}
	// The answers of the server go where the sender says: they must not land
	// in a bucket, and must not speak for b.
	var seen fold
	s := srv.Conn(t, ca.Identity(t, identity.RoleSubscriber, "s"))
	bustest.Go(t, func(ctx context.Context) error { return s.FollowPlacements(ctx, seen.add) })
	require.Eventually(t, func() bool { return seen.counter("shop", "b") == 1 }, soon, poll)
	forged, err := event("shop", "b", 9, false).Marshal()
	require.NoError(t, err)
	for _, reply := range []string{"$KV.opfield_routes.shop", "$KV.opfield_relays.r", "opfield.kv.opfield_routes.shop", "opfield.placement.v1.shop.b"} {
		require.NoError(t, a.PublishRequest("opfield.placement.v1.shop.a", reply, forged))
		require.NoError(t, a.PublishRequest("opfield.read.KV_opfield_relays", reply, []byte(`{"seq":1}`)))
		require.NoError(t, a.PublishRequest("opfield.last.v1.node.a", reply, []byte("shop")))
		require.NoError(t, a.PublishRequest("opfield.identity.v1.node.a", reply, forged))
	}
	// A reader copies a stored forgery to b's subject.
	i := dial(t, srv, ca.Identity(t, identity.RoleIngress, "i"))
	get := []byte(`{"seq":1,"next_by_subj":"opfield.placement.v1.shop.a","batch":5}`)
	require.NoError(t, i.PublishRequest("opfield.read.OPFIELD_PLACEMENTS", "opfield.placement.v1.shop.b", get))
	require.NoError(t, a.Flush())
	require.NoError(t, i.Flush())
	publish(t, b, event("late", "b", 1, true))
	require.Eventually(t, func() bool { return seen.counter("late", "b") == 1 }, soon, poll)
	require.EqualValues(t, 1, seen.counter("shop", "b"))
	for bucket, key := range map[string]string{bus.BucketRoutes: "shop", bus.BucketRelays: "r"} {
		stored, err := srv.Controller.ReadBucket(t.Context(), bucket)
		require.NoError(t, err)
		require.Equal(t, map[string][]byte{key: []byte("good")}, stored)
	}
	// What a new subscriber sees is repaired by b itself.
	require.Eventually(t, func() bool {
		e, found, err := b.LastPlacement(t.Context(), placement.ID{Workload: "shop", Node: "b"})
		return err == nil && found && e.Sequence.Counter == 1
	}, soon, poll)
	var fresh fold
	s2 := srv.Conn(t, ca.Identity(t, identity.RoleSubscriber, "s2"))
	bustest.Go(t, func(ctx context.Context) error { return s2.FollowPlacements(ctx, fresh.add) })
	require.Eventually(t, func() bool { return fresh.counter("late", "b") == 1 }, soon, poll)
	require.Eventually(t, func() bool { return fresh.counter("shop", "b") == 1 }, soon, poll)
}

// Those who only read cannot make the server write for them either.
func TestPermissions_ReadersStoreNothing(t *testing.T) { // SEC-2
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	b := srv.Conn(t, ca.Identity(t, identity.RoleNode, "b")) // it repairs nothing
	publish(t, b, event("shop", "b", 1, true))
	for _, role := range []identity.Role{identity.RoleIngress, identity.RoleSubscriber} {
		p := dial(t, srv, ca.Identity(t, role, "x"))
		get := []byte(`{"seq":1,"next_by_subj":"opfield.placement.v1.>","batch":5}`)
		require.NoError(t, p.PublishRequest("opfield.read.OPFIELD_PLACEMENTS", "opfield.placement.v1.shop.b", get))
		require.NoError(t, p.Flush())
	}
	relay := dial(t, srv, ca.Identity(t, identity.RoleRelay, "x"))
	require.NoError(t, relay.PublishRequest("opfield.identity.v1.relay.x", "opfield.placement.v1.shop.b", nil))
	require.NoError(t, relay.Flush())
	require.Never(t, func() bool {
		e, found, err := b.LastPlacement(t.Context(), placement.ID{Workload: "shop", Node: "b"})
		return err != nil || !found || e.Sequence.Counter != 1
	}, 500*time.Millisecond, 10*poll)
}

func TestServer_RefusesStrangers(t *testing.T) { // SEC-1
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	stranger := identitytest.New(t).Identity(t, identity.RoleController, "main")
	cfg := stranger.ClientTLS(identity.ControllerName())
	cfg.InsecureSkipVerify, cfg.VerifyConnection = true, nil
	_, err := nats.Connect(srv.URL(), nats.Secure(cfg))
	require.Error(t, err)
	cfg = cfg.Clone()
	cfg.GetClientCertificate = nil
	_, err = nats.Connect(srv.URL(), nats.Secure(cfg))
	require.Error(t, err)
}
