package upstream_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

func event(workload, node string, counter uint64, change ...func(*placement.Event)) placement.Event {
	e := placement.Event{
		Workload: workload, Node: node, Placement: workload + "." + node, Kind: placement.KindContainer,
		Role: placement.RoleServing, Ready: true, State: placement.StateRunning,
		Ports:    []placement.Port{{Port: 80, Protocol: placement.ProtocolHTTP}},
		Sequence: placement.Sequence{Incarnation: 1, Counter: counter},
	}
	for _, c := range change {
		c(&e)
	}
	return e
}

func notReady(e *placement.Event) { e.Ready = false }
func role(r placement.Role) func(*placement.Event) {
	return func(e *placement.Event) { e.Role = r }
}
func state(s placement.State) func(*placement.Event) {
	return func(e *placement.Event) { e.State = s }
}

func link(workload, node string) placement.LinkID {
	return placement.LinkID{Placement: placement.ID{Workload: workload, Node: node}, Port: 80}
}

func report(e placement.Event, present bool) upstream.LinkReport {
	return upstream.LinkReport{
		Link: link(e.Workload, e.Node), Order: e.Order(), Role: e.Role, Ready: e.Ready && present, State: e.State,
		Protocol: placement.ProtocolHTTP, Present: present,
	}
}

func states(t *upstream.Table) string {
	s := ""
	for _, o := range t.Orders() {
		s += fmt.Sprintf("%s=%s ", o.Link.Placement.Node, o.State)
	}
	return s
}

func TestTable_States(t *testing.T) { // LNK-1, LNK-2, LNK-4, LNK-5, EVT-3
	both := func(tb *upstream.Table) {
		tb.Event(event("w", "a", 1))
		tb.Event(event("w", "b", 1))
	}
	for name, c := range map[string]struct {
		do   func(*upstream.Table)
		want string
	}{
		"both open": {both, "a=open b=open "},
		"older never overrides": {func(tb *upstream.Table) {
			both(tb)
			tb.Event(event("w", "a", 5))
			tb.Event(event("w", "a", 4, notReady))
		}, "a=open b=open "},
		"not ready is closed": {func(tb *upstream.Table) { both(tb); tb.Event(event("w", "a", 2, notReady)) }, "a=closed b=open "},
		"primary is joined": {func(tb *upstream.Table) {
			both(tb)
			tb.Proven([]placement.LinkID{link("w", "a")})
			tb.Event(event("w", "a", 2, role(placement.RoleDraining)))
		}, "a=joined b=open "},
		"nothing open: serving holds, standby is closed": {func(tb *upstream.Table) {
			tb.Event(event("w", "a", 2, notReady))
			tb.Event(event("w", "b", 2, role(placement.RoleStandby)))
		}, "a=holding b=closed "},
		"relay without authority changes nothing": {func(tb *upstream.Table) { both(tb); tb.RelayUp("r", true, false) }, "a=open b=open "},
		"authoritative relay without the link": {func(tb *upstream.Table) {
			both(tb)
			tb.RelayUp("r", true, false)
			tb.RelayReport("r", report(event("w", "a", 1), true))
			tb.RelayUp("r", true, true)
		}, "a=open b=closed "},
		"one relay of two has it": {func(tb *upstream.Table) {
			both(tb)
			tb.RelayUp("r", true, true)
			tb.RelayUp("q", true, true)
			tb.RelayReport("r", report(event("w", "a", 1), true))
			tb.RelayReport("q", report(event("w", "b", 1), true))
		}, "a=open b=open "},
		"dropped session holds when nothing else serves": {func(tb *upstream.Table) {
			tb.Event(event("w", "a", 1))
			tb.RelayUp("r", true, true)
			tb.RelayReport("r", report(event("w", "a", 1), false))
		}, "a=holding "},
		"dropped then relay lost: the last word counts": {func(tb *upstream.Table) {
			both(tb)
			tb.RelayUp("r", true, true)
			tb.RelayReport("r", report(event("w", "b", 1), true))
			tb.RelayReport("r", report(event("w", "a", 1), false))
			tb.RelayUp("r", false, false)
		}, "a=closed b=open "},
		"relay restarts: old views fade only with authority": {func(tb *upstream.Table) {
			both(tb)
			tb.RelayUp("r", true, true)
			tb.RelayReport("r", report(event("w", "a", 1), true))
			tb.RelayReport("r", report(event("w", "b", 1), true))
			tb.RelayUp("r", false, false)
			tb.RelayUp("r", true, false)
			tb.RelayReport("r", report(event("w", "a", 1), true))
		}, "a=open b=open "},
		"new session of an old relay: its full list counts at once": {func(tb *upstream.Table) {
			both(tb)
			tb.RelaySession("r", true, []upstream.LinkReport{report(event("w", "a", 1), true), report(event("w", "b", 1), true)})
			tb.RelaySession("r", true, []upstream.LinkReport{report(event("w", "b", 1), true)})
		}, "a=closed b=open "},
		"new session of a young relay: its silence does not count": {func(tb *upstream.Table) {
			both(tb)
			tb.RelaySession("r", true, []upstream.LinkReport{report(event("w", "a", 1), true), report(event("w", "b", 1), true)})
			tb.RelaySession("r", false, []upstream.LinkReport{report(event("w", "b", 1), true)})
		}, "a=open b=open "},
		"newer report counts as an event": {func(tb *upstream.Table) {
			both(tb)
			tb.RelayUp("r", true, false)
			tb.RelayReport("r", report(event("w", "a", 2, role(placement.RoleDraining)), true))
		}, "a=closed b=open "},
		"report alone is enough": {func(tb *upstream.Table) {
			tb.RelayUp("r", true, false)
			tb.RelayReport("r", report(event("w", "a", 2), true))
		}, "a=open "},
		"lost node": {func(tb *upstream.Table) { both(tb); tb.Node("a", true, 2); tb.Node("a", false, 1) }, "a=closed b=open "},
		"lost node that a relay holds ready": {func(tb *upstream.Table) {
			both(tb)
			tb.Node("a", true, 1)
			tb.RelayUp("r", true, false)
			tb.RelayReport("r", report(event("w", "a", 1), true))
		}, "a=open b=open "},
		"node back":    {func(tb *upstream.Table) { both(tb); tb.Node("a", true, 1); tb.Node("a", false, 2) }, "a=open b=open "},
		"removed":      {func(tb *upstream.Table) { both(tb); tb.Event(event("w", "a", 2, state(placement.StateRemoved))) }, "a=closed b=open "},
		"removed last": {func(tb *upstream.Table) { tb.Event(event("w", "a", 2, state(placement.StateRemoved))) }, "a=closed "},
	} {
		t.Run(name, func(t *testing.T) {
			var tb upstream.Table
			c.do(&tb)
			require.Equal(t, c.want, states(&tb))
		})
	}
}

func TestTable_Forget(t *testing.T) { // EVT-1
	var tb upstream.Table
	tb.Event(event("w", "a", 1))
	tb.Event(event("w", "b", 1, state(placement.StateRemoved)))
	for _, n := range []string{"a", "b", "c"} {
		tb.Forget(placement.ID{Workload: "w", Node: n})
	}
	tb.Forget(placement.ID{Workload: "x", Node: "a"})
	require.Equal(t, "a=open ", states(&tb))
}

func TestTable_Members(t *testing.T) { // LNK-2, LOS-3, DSC-2, RDY-2
	generation := func(g uint64) func(*placement.Event) {
		return func(e *placement.Event) { e.Generation = g }
	}
	var tb upstream.Table
	for node, g := range map[string]uint64{"a": 1, "b": 2, "c": 2, "d": 2} {
		tb.Event(event("w", node, 1, generation(g)))
	}
	tb.Event(event("x", "a", 1)) // has no policy
	tb.Proven([]placement.LinkID{link("w", "a"), link("w", "b")})
	tb.SetMembers([]placement.Members{{Workload: "w", Placements: []placement.Member{
		{Node: "a", Generation: 2}, {Node: "b", Generation: 2}, {Node: "c", Generation: 2, Closed: true},
	}}})
	want := map[string]upstream.Order{
		"w.a": {State: upstream.Joined, Reset: true}, // stale
		"w.b": {State: upstream.Open},                //
		"w.c": {State: upstream.Closed},              // suspended or draining: running streams go on
		"w.d": {State: upstream.Closed, Reset: true}, // no placement of the policy
		"x.a": {State: upstream.Open, MayHold: true},
	}
	for _, o := range tb.Orders() {
		w := want[o.Link.Placement.String()]
		require.Equal(t, w.State, o.State, o.Link.String())
		require.Equal(t, w.Reset, o.Reset, o.Link.String())
		if o.State != upstream.Open {
			require.False(t, o.MayHold, o.Link.String())
		}
	}
	tb.Event(event("w", "a", 2, generation(2)))
	require.Equal(t, upstream.Open, tb.Orders()[0].State, "the present generation counts")
	tb.SetMembers(nil)
	for _, o := range tb.Orders() {
		require.Equal(t, upstream.Open, o.State, "without a policy every placement counts: %s", o.Link)
	}
}

func TestTable_Routes(t *testing.T) { // RTE-11, RTE-2
	var tb upstream.Table
	older := upstream.Route{Name: "zz", Hosts: []string{"A.example", "b.example"}, Workload: "w", Port: 80, Created: 1}
	newer := upstream.Route{Name: "aa", Hosts: []string{"a.example.", "c.example"}, Workload: "x", Port: 80, Created: 2}
	only := upstream.Route{Name: "only", Hosts: []string{"b.example"}, Workload: "y", Port: 80, Created: 3}
	tcp := upstream.Route{Name: "t1", Protocol: placement.ProtocolTCP, Listen: 99, Workload: "w", Port: 81, Created: 1}
	tcp2 := upstream.Route{Name: "t2", Protocol: placement.ProtocolTCP, Listen: 99, Workload: "w", Port: 82, Created: 2}
	broken := upstream.Route{Name: "broken", Hosts: []string{"{}"}, Workload: "w", Port: 80}
	tb.SetRoutes([]upstream.Route{newer, tcp2, older, only, broken, tcp})
	tb.Event(event("w", "a", 1))
	tb.Event(event("w", "b", 1, notReady))
	tb.Event(event("w", "c", 1, state(placement.StateRemoved)))

	views := map[string]upstream.RouteView{}
	for _, v := range tb.Routes() {
		views[v.Route.Name] = v
	}
	require.Equal(t, []string{"a.example", "b.example"}, views["zz"].Route.Hosts)
	require.Equal(t, []string{"c.example"}, views["aa"].Route.Hosts)
	require.True(t, views["aa"].Problems.Has(upstream.CodeHostConflict))
	require.Contains(t, views["aa"].Problems.Error(), "a.example is held by the older route zz")
	require.False(t, views["only"].Serves)
	require.False(t, views["t2"].Serves)
	require.True(t, views["t2"].Problems.Has(upstream.CodePortConflict))
	require.False(t, views["broken"].Serves)
	require.Equal(t, 1, views["zz"].Open)
	require.Equal(t, 2, views["zz"].Known)

	services := tb.Services()
	require.Len(t, services, 3)
	require.Equal(t, []placement.LinkID{link("w", "a")}, services[0].Open)
	require.Equal(t, []placement.LinkID{link("w", "b")}, services[0].Others)
	require.Equal(t, uint16(81), services[1].Port)

	tb.SetRoutes([]upstream.Route{newer, only})
	for _, v := range tb.Routes() {
		require.True(t, v.Serves)
		require.Empty(t, v.Problems, "the free host is taken over")
	}
}

// Any order of arrival gives the same orders and services; only the reports
// of one relay about one link keep their order, as they do on the wire.
func TestTable_AnyOrderOfArrival(t *testing.T) { // EVT-3, RTE-8
	rapid.Check(t, func(t *rapid.T) {
		nodes := []string{"a", "b", "c"}
		var lanes [][]func(*upstream.Table)
		var events []placement.Event
		for range rapid.IntRange(1, 12).Draw(t, "events") {
			e := event("w", rapid.SampledFrom(nodes).Draw(t, "node"), 0)
			e.Generation = rapid.Uint64Range(0, 1).Draw(t, "gen")
			// One order is one content.
			e.Sequence.Counter = rapid.Uint64Range(0, 63).Draw(t, "counter")
			c := e.Sequence.Counter
			e.Ready = c&1 == 0
			e.Role = []placement.Role{placement.RoleServing, placement.RoleStandby}[c>>1&1]
			e.State = []placement.State{placement.StateRunning, placement.StateStopped, placement.StateRemoved, placement.StateRunning}[c>>2&3]
			if c>>4&1 == 1 {
				e.Ports[0].Protocol = placement.ProtocolGRPC
			}
			if c>>5&1 == 1 {
				e.Ports = append(e.Ports, placement.Port{Port: 81, Protocol: placement.ProtocolTCP})
			}
			events = append(events, e)
			lanes = append(lanes, []func(*upstream.Table){func(tb *upstream.Table) { tb.Event(e) }})
		}
		for _, name := range []string{"r", "q"} {
			var lane []func(*upstream.Table)
			for range rapid.IntRange(0, 8).Draw(t, "steps") {
				switch rapid.IntRange(0, 3).Draw(t, "step") {
				case 0:
					up, auth := rapid.Bool().Draw(t, "up"), rapid.Bool().Draw(t, "auth")
					lane = append(lane, func(tb *upstream.Table) { tb.RelayUp(name, up, auth) })
				default:
					e := rapid.SampledFrom(events).Draw(t, "reported")
					rep := report(e, rapid.Bool().Draw(t, "present"))
					rep.Protocol = e.Ports[0].Protocol
					lane = append(lane, func(tb *upstream.Table) { tb.RelayReport(name, rep) })
				}
			}
			lanes = append(lanes, lane)
		}
		lost := rapid.Bool().Draw(t, "lost")
		lanes = append(lanes,
			[]func(*upstream.Table){func(tb *upstream.Table) { tb.Node("a", lost, 3) }},
			[]func(*upstream.Table){func(tb *upstream.Table) { tb.Node("a", !lost, 2) }},
			[]func(*upstream.Table){func(tb *upstream.Table) {
				tb.SetRoutes([]upstream.Route{{Name: "r", Hosts: []string{"h"}, Workload: "w", Port: 80}})
			}},
			[]func(*upstream.Table){func(tb *upstream.Table) { tb.Proven([]placement.LinkID{link("w", "b")}) }},
		)
		run := func(label string) string {
			var tb upstream.Table
			left := make([][]func(*upstream.Table), len(lanes))
			copy(left, lanes)
			for len(left) > 0 {
				i := rapid.IntRange(0, len(left)-1).Draw(t, label)
				if len(left[i]) > 0 {
					left[i][0](&tb)
					left[i] = left[i][1:]
				}
				if len(left[i]) == 0 {
					left = append(left[:i:i], left[i+1:]...)
				}
				if rapid.Bool().Draw(t, label+" reads") {
					tb.Orders()
				}
			}
			return fmt.Sprintf("%+v %+v %+v", tb.Orders(), tb.Services(), tb.Routes())
		}
		if a, b := run("first"), run("second"); a != b {
			t.Fatalf("order of arrival matters:\n%s\n%s", a, b)
		}
	})
}

// Whatever happens, only serving placements are open, and a joined or
// holding link has a reason to be.
func TestTable_Invariants(t *testing.T) { // LNK-2, LNK-5
	rapid.Check(t, func(t *rapid.T) {
		var tb upstream.Table
		last := map[string]placement.Event{}
		for i := range rapid.IntRange(1, 20).Draw(t, "n") {
			e := event("w", rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "node"), uint64(i))
			e.Ready = rapid.Bool().Draw(t, "ready")
			e.Role = rapid.SampledFrom([]placement.Role{placement.RoleServing, placement.RoleStandby, placement.RoleDraining}).Draw(t, "role")
			tb.Event(e)
			last[e.Node] = e
			if rapid.Bool().Draw(t, "prove") {
				tb.Proven([]placement.LinkID{link("w", "a")})
			}
			for _, o := range tb.Orders() {
				e := last[o.Link.Placement.Node]
				switch o.State {
				case upstream.Open:
					if !e.Serves() {
						t.Fatalf("%v is open and does not serve", o)
					}
				case upstream.Joined:
					if !o.Primary || len(o.Open) == 0 {
						t.Fatalf("%v is joined to nothing or no primary", o)
					}
				case upstream.Holding:
					if !o.MayHold || len(o.Open) > 0 || e.Role != placement.RoleServing {
						t.Fatalf("%v may not hold", o)
					}
				case upstream.Closed:
					if e.Serves() {
						t.Fatalf("%v is closed and serves", o)
					}
				default:
					t.Fatalf("unknown state %v", o)
				}
			}
		}
	})
}

func BenchmarkTable_Event(b *testing.B) { // EVT-4
	var tb upstream.Table
	for w := range 2000 {
		for n := range 3 {
			tb.Event(event(fmt.Sprintf("w%d", w), fmt.Sprintf("n%d", n), 1))
		}
	}
	tb.Orders()
	b.ResetTimer()
	for i := range b.N {
		tb.Event(event("w7", "n1", uint64(i+2)))
		tb.Orders()
	}
}
