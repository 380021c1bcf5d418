package bus_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
)

func TestServer_SaysWhenThePortIsTaken(t *testing.T) {
	ca := identitytest.New(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	srv, err := bus.NewServer(bus.ServerConfig{Addr: ln.Addr().String(), StoreDir: t.TempDir(), Identity: ca.Controller(t), Logger: bustest.Logger(t)})
	require.NoError(t, err)
	begin := time.Now()
	require.ErrorContains(t, srv.Run(t.Context()), "address already in use")
	require.Less(t, time.Since(begin), soon)
}

func TestNewServer_Refuses(t *testing.T) {
	for _, addr := range []string{"", "4222", "host:port", ":70000"} {
		_, err := bus.NewServer(bus.ServerConfig{Addr: addr})
		require.ErrorContains(t, err, "nats listen address", addr)
	}
}

func TestClose_LeavesNothingBehind(t *testing.T) { // LNK-9
	before := goleak.IgnoreCurrent()
	t.Run("session", func(t *testing.T) {
		ca := identitytest.New(t)
		srv := bustest.Start(t, ca)
		c := srv.Conn(t, ca.Identity(t, identity.RoleNode, "a"))
		publish(t, c, event("shop", "a", 1, true))
		bustest.Go(t, c.KeepPlacements)
		bustest.Go(t, c.FollowRevocations)
		i := srv.Conn(t, ca.Identity(t, identity.RoleIngress, "i"))
		got := make(chan struct{}, 100)
		bustest.Go(t, func(ctx context.Context) error {
			return i.FollowPlacements(ctx, func(placement.Event) { got <- struct{}{} })
		})
		<-got
	})
	goleak.VerifyNone(t, before)
}
