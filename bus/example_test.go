package bus_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

// A subscriber that joined as docs/events.md says prints where every workload
// serves, until it is interrupted. (EVT-5)
func ExampleConn_FollowPlacements() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	id, err := identity.Open("./reader")
	if err != nil {
		fmt.Println(err)
		return
	}
	conn, err := bus.Connect(bus.Config{Identity: id, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()

	newest := map[placement.ID]placement.Event{}
	_ = conn.FollowPlacements(ctx, func(e placement.Event) {
		if old, known := newest[e.ID()]; known && !e.Order().Newer(old.Order()) {
			return
		}
		newest[e.ID()] = e
		fmt.Println(e.Workload, "on", e.Node, "serves:", e.Serves())
	})
}
