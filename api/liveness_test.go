package api

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
)

func node(id string) identity.Name  { return identity.Name{Role: identity.RoleNode, ID: id} }
func relay(id string) identity.Name { return identity.Name{Role: identity.RoleRelay, ID: id} }

func holding(nodes ...string) bus.Status {
	s := bus.Status{Relay: &bus.RelayStatus{}}
	for _, n := range nodes {
		s.Relay.Sessions = append(s.Relay.Sessions, bus.RelaySession{Name: node(n)})
	}
	return s
}

func TestJudge(t *testing.T) { // LOS-1, LOS-4
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	old, quiet, fresh, long := now.Add(-6*time.Second), now.Add(-4*time.Second), now.Add(-2*time.Second), now.Add(-time.Hour)
	for label, tc := range map[string]struct {
		heard     time.Time
		processes map[identity.Name]seen
		before    map[string]Liveness
		want      map[string]Liveness
	}{
		"fresh is online": {long, map[identity.Name]seen{node("a"): {at: fresh}}, nil, map[string]Liveness{"a": Online}},
		"silent and no relay at all": {long, map[identity.Name]seen{node("a"): {at: old}, node("b"): {at: fresh}}, nil,
			map[string]Liveness{"a": Offline, "b": Online}},
		"silent but a relay holds it": {long, map[identity.Name]seen{node("a"): {at: old}, relay("r"): {holding("a"), fresh}}, nil,
			map[string]Liveness{"a": NotReporting}},
		"silent and the relay dropped it": {long, map[identity.Name]seen{node("a"): {at: old}, relay("r"): {holding("b"), fresh}}, nil,
			map[string]Liveness{"a": Offline}},
		"the word of a silent relay is not used": {long, map[identity.Name]seen{node("a"): {at: old}, relay("r"): {holding("a"), fresh}, relay("s"): {holding("a"), old}}, nil,
			map[string]Liveness{"a": NotReporting}},
		"no relay reports": {long, map[identity.Name]seen{node("a"): {at: old}, relay("r"): {holding(), old}}, nil,
			map[string]Liveness{"a": NotReporting}},
		"the controller is cut off": {time.Time{}, map[identity.Name]seen{node("a"): {at: old}}, nil, map[string]Liveness{"a": NotReporting}},
		"only just back":            {fresh, map[identity.Name]seen{node("a"): {at: old}}, nil, map[string]Liveness{"a": NotReporting, "b": Unseen}},
		"never seen since the start": {long, map[identity.Name]seen{node("b"): {at: fresh}}, nil,
			map[string]Liveness{"a": Offline, "b": Online}},
		"most at once": {long, map[identity.Name]seen{node("a"): {at: old}, node("b"): {at: old}, node("c"): {at: fresh}}, nil,
			map[string]Liveness{"a": NotReporting, "b": NotReporting, "c": Online}},
		"most at once, and one is noticed first": {long, map[identity.Name]seen{node("a"): {at: old}, node("b"): {at: quiet}, node("c"): {at: fresh}}, nil,
			map[string]Liveness{"a": NotReporting, "b": Online, "c": Online}},
		"one of them was late only": {long, map[identity.Name]seen{node("a"): {at: old}, node("b"): {at: fresh}, node("c"): {at: fresh}}, map[string]Liveness{"a": NotReporting},
			map[string]Liveness{"a": Offline, "b": Online, "c": Online}},
		"one after the other": {long, map[identity.Name]seen{node("a"): {at: old}, node("b"): {at: old}, node("c"): {at: fresh}}, map[string]Liveness{"a": Offline},
			map[string]Liveness{"a": Offline, "b": Offline, "c": Online}},
		"fewer than those that live": {long, map[identity.Name]seen{node("a"): {at: old}, node("b"): {at: old}, node("c"): {at: fresh}, node("d"): {at: fresh}}, nil,
			map[string]Liveness{"a": Offline, "b": Offline, "c": Online, "d": Online}},
	} {
		var nodes []string
		for n := range tc.want {
			nodes = append(nodes, n)
		}
		got := map[string]Liveness{}
		for n, v := range judge(now, tc.heard, nodes, tc.processes, tc.before) {
			got[n] = v.state
		}
		require.Equal(t, tc.want, got, label)
	}
}
