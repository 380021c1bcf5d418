package guard

import (
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const asGuard = "OPFIELD_TEST_GUARD"

// TestMain lets the test binary be the guard process.
func TestMain(m *testing.M) {
	if os.Getenv(asGuard) != "" {
		if err := Serve(3); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func start(t *testing.T) (*Guard, func()) {
	t.Setenv(asGuard, "1")
	g := New(Config{Command: []string{os.Args[0]}, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = g.Run(ctx) })
	stop := sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	require.Eventually(t, func() bool { g.mu.Lock(); defer g.mu.Unlock(); return g.sock != nil }, 5*time.Second, time.Millisecond)
	return g, stop
}

func pair(t *testing.T) (sidecar *net.TCPConn, nginx net.Conn) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	nginx, err = net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	c, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = nginx.Close() })
	return c.(*net.TCPConn), nginx
}

// LNK-6: what a killed sidecar leaves behind does not end like an answer.
func TestGuard_EndsWithJunkAfterKill(t *testing.T) {
	g, stop := start(t)
	killed, nginx := pair(t)
	done, other := pair(t)
	g.Hold(killed)
	release := g.Hold(done)
	// One ends in good order.
	require.NoError(t, done.CloseWrite())
	require.NoError(t, done.Close())
	release()
	got, err := io.ReadAll(other)
	require.NoError(t, err)
	require.Empty(t, got)

	// A kill closes the descriptors and says nothing. While the guard holds
	// the connection, nginx sees nothing of it.
	require.NoError(t, killed.Close())
	_ = nginx.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	_, err = nginx.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	stop() // our end of the socket is gone, as after a kill
	_ = nginx.SetReadDeadline(time.Now().Add(5 * time.Second))
	got, err = io.ReadAll(nginx)
	require.NoError(t, err)
	require.Len(t, got, junk)
}

// A guard process that is replaced cuts nothing, and the next one holds all.
func TestGuard_SurvivesItsProcess(t *testing.T) {
	g, stop := start(t)
	c, nginx := pair(t)
	g.Hold(c)
	g.mu.Lock()
	first := g.proc
	g.mu.Unlock()
	require.NoError(t, first.Kill())
	require.Eventually(t, func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.sock != nil && g.proc != first
	}, 5*time.Second, time.Millisecond)
	_ = nginx.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	_, err := nginx.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, c.Close())
	stop()
	_ = nginx.SetReadDeadline(time.Now().Add(5 * time.Second))
	got, err := io.ReadAll(nginx)
	require.NoError(t, err)
	require.Len(t, got, junk)
}
