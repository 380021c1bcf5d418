package bus_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
)

// lockedBuffer is a log that the test reads while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) count(s string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Count(b.b.String(), s)
}

func TestFollowPlacements_SkipsMalformed(t *testing.T) { // EVT-2, EVT-3
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	log, reg := &lockedBuffer{}, prometheus.NewRegistry()
	sub, err := bus.Connect(bus.Config{
		URLs: []string{srv.URL()}, Identity: ca.Identity(t, identity.RoleSubscriber, "s"),
		Logger: slog.New(slog.NewTextHandler(log, nil)), Registerer: reg,
	})
	require.NoError(t, err)
	defer sub.Close()
	var seen fold
	bustest.Go(t, func(ctx context.Context) error { return sub.FollowPlacements(ctx, seen.add) })
	nodeID := ca.Identity(t, identity.RoleNode, "a")
	node, raw := srv.Conn(t, nodeID), dial(t, srv, nodeID)
	publish(t, node, event("good", "a", 1, true))
	require.Eventually(t, func() bool { return seen.counter("good", "a") == 1 }, soon, poll)

	valid, err := event("shop", "a", 1, true).Marshal()
	require.NoError(t, err)
	other, err := event("shop", "b", 1, true).Marshal()
	require.NoError(t, err)
	for _, bad := range [][]byte{
		nil, []byte("{"), []byte("\xff\x00"), other, valid[:len(valid)-9],
		bytes.Replace(valid, []byte("health.v1"), []byte("health.v2"), 1),
		bytes.Replace(valid, []byte(`"serving"`), []byte(`"boss"`), 1),
	} {
		require.NoError(t, raw.Publish("opfield.placement.v1.shop.a", bad))
	}
	unknown := bytes.Replace(valid, []byte(`"workload"`), []byte(`"new":1,"workload"`), 1)
	require.NoError(t, raw.Publish("opfield.placement.v1.shop.a", unknown))
	require.Eventually(t, func() bool { return seen.counter("shop", "a") == 1 }, soon, poll)
	require.Equal(t, 1, log.count("malformed message skipped"))
	require.GreaterOrEqual(t, counter(t, reg, "opfield_malformed_messages_total"), 7.0)
	require.Equal(t, 2, seen.size())
}

// A node that fills pages with messages that are skipped hides nobody else's.
func TestFollowPlacements_SkippedPageHidesNoOther(t *testing.T) { // EVT-3, SEC-2
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	bad := dial(t, srv, ca.Identity(t, identity.RoleNode, "a"))
	for i := range 1100 {
		msg := nats.NewMsg(fmt.Sprintf("opfield.placement.v1.w%d.a", i))
		msg.Header.Set("Nats-Sequence", "1")
		require.NoError(t, bad.PublishMsg(msg))
	}
	require.NoError(t, bad.Flush())
	publish(t, srv.Conn(t, ca.Identity(t, identity.RoleNode, "b")), event("good", "b", 1, true))
	sub := srv.Conn(t, ca.Identity(t, identity.RoleSubscriber, "s"))
	var seen fold
	bustest.Go(t, func(ctx context.Context) error { return sub.FollowPlacements(ctx, seen.add) })
	require.Eventually(t, func() bool { return seen.counter("good", "b") == 1 }, soon, poll)
}

func counter(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}
