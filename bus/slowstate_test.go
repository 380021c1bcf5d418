package bus_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
)

// A process that is slow to say how it is, because it waits for a processor or
// for a lock, is not silent for long: nobody may take it for one that is gone.
func TestPublishStatus_Slow(t *testing.T) {
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	node := srv.Conn(t, ca.Identity(t, identity.RoleNode, "a"))
	var mu sync.Mutex
	var heard []time.Time
	bustest.Go(t, func(ctx context.Context) error {
		return srv.Controller.FollowStatus(ctx, func(bus.Status) {
			mu.Lock()
			defer mu.Unlock()
			heard = append(heard, time.Now())
		})
	})
	const slow = 150 * time.Millisecond
	bustest.Go(t, func(ctx context.Context) error {
		return node.PublishStatus(ctx, func() bus.Status {
			<-time.After(slow)
			return bus.Status{}
		})
	})
	times := func() []time.Time {
		mu.Lock()
		defer mu.Unlock()
		return append([]time.Time(nil), heard...)
	}
	require.Eventually(t, func() bool { return len(times()) >= 3 }, 3*bus.StatusEvery+3*time.Second, poll)
	all := times()
	for i := range all[1:] {
		require.Less(t, all[i+1].Sub(all[i]), 2*bus.StatusEvery+time.Second, "two are missed before anybody minds")
	}
}
