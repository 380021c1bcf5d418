package bus_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
)

func TestAskReport(t *testing.T) {
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	node := srv.Conn(t, ca.Identity(t, identity.RoleNode, "a"))
	bustest.Go(t, func(ctx context.Context) error {
		return node.PublishReport(ctx, func() (placement.NodeReport, bool) { return placement.NodeReport{}, true })
	})
	bustest.Go(t, func(ctx context.Context) error {
		return node.AnswerInspect(ctx, func(context.Context, string) (placement.Captured, error) {
			return placement.Captured{}, errors.New("nothing is to be inspected")
		})
	})
	var heard atomic.Int64
	bustest.Go(t, func(ctx context.Context) error {
		return srv.Controller.FollowReports(ctx, func(placement.NodeReport) { heard.Add(1) })
	})
	// Nothing changes, and each time it is asked for it comes.
	for range 3 {
		before := heard.Load()
		require.Eventually(t, func() bool {
			require.NoError(t, srv.Controller.AskReport("a"))
			return heard.Load() > before
		}, soon, 20*poll)
	}
	require.Error(t, srv.Controller.AskReport("a.b"))
}
