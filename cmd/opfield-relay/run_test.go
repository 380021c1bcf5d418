package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/cmd/internal/daemon"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/relay"
)

// A relay whose certificate is not renewed any more, or that does not hear of
// revocations, must not serve on without a word: it ends and is started again.
func TestWork_APartThatFailsEndsTheRelay(t *testing.T) {
	ca := identitytest.New(t)
	id := ca.Identity(t, identity.RoleRelay, "relay-1")
	conn := bustest.Start(t, ca).Conn(t, id)
	cfg := relay.DefaultConfig()
	cfg.ID, cfg.TLS, cfg.Authenticate = "relay-1", id.ServerTLS(identity.RoleNode), peer
	cfg.Logger = slog.New(slog.DiscardHandler)
	server, err := relay.New(cfg)
	require.NoError(t, err)
	handover, err := daemon.NewHandover(filepath.Join(t.TempDir(), "relay.pid"))
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	failed := errors.New("a part failed")
	ended := make(chan error, 1)
	go func() {
		var c runCmd
		ended <- c.work(t.Context(), cfg.Logger, id, conn, server, handover, ln, func(context.Context) error { return failed })
	}()
	select {
	case err := <-ended:
		require.ErrorIs(t, err, failed)
	case <-time.After(stopWithin + 5*time.Second):
		t.Fatal("it goes on")
	}
}
