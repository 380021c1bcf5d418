package upstream_test

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// EVT-4: whoever follows Changes knows what Orders would tell, at all times.
func TestTable_ChangesFollowOrders(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var tb upstream.Table
		known := map[placement.LinkID]upstream.Order{}
		for i := range rapid.IntRange(1, 40).Draw(t, "n") {
			workload := fmt.Sprintf("w%d", rapid.IntRange(0, 3).Draw(t, "workload"))
			node := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "node")
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0:
				tb.Proven([]placement.LinkID{link(workload, node)})
			case 1:
				tb.Forget(placement.ID{Workload: workload, Node: node})
			case 2:
				tb.Services()
			case 3:
				tb.SetRoutes([]upstream.Route{{Name: "r", Hosts: []string{"h"}, Workload: workload, Port: 80}})
			default:
				e := event(workload, node, uint64(i))
				e.Ready = rapid.Bool().Draw(t, "ready")
				e.State = rapid.SampledFrom([]placement.State{placement.StateRunning, placement.StateRemoved}).Draw(t, "state")
				if rapid.Bool().Draw(t, "another port") {
					e.Ports[0].Port = 81
				}
				tb.Event(e)
			}
			if rapid.Bool().Draw(t, "more first") {
				continue
			}
			changed, whole := tb.Changes()
			if whole {
				clear(known)
				changed = tb.Orders()
			}
			for _, o := range changed {
				known[o.Link] = o
			}
			all := tb.Orders()
			if len(all) != len(known) {
				t.Fatalf("%d orders, %d known", len(all), len(known))
			}
			for _, o := range all {
				if a, b := fmt.Sprintf("%+v", o), fmt.Sprintf("%+v", known[o.Link]); a != b {
					t.Fatalf("order %s, known %s", a, b)
				}
			}
		}
	})
}
