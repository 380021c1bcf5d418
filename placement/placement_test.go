package placement

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func good() Event {
	return Event{
		Workload: "shop", Placement: "shop.node-1", Node: "node-1", Kind: KindContainer, Generation: 3, Epoch: 2,
		Role: RoleServing, Ready: true, State: StateRunning, Reason: "health check passed",
		Ports:      []Port{{8080, ProtocolHTTP}, {9000, ProtocolTCP}},
		ObservedAt: time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC), Sequence: Sequence{Incarnation: 7, Counter: 9},
	}
}

func TestCheckName(t *testing.T) {
	for _, name := range []string{"a", "web", "a-b", "9", strings.Repeat("x", MaxNameLength)} {
		require.NoError(t, CheckName(name), name)
	}
	for _, name := range []string{
		"", "-a", "a-", "A", "a.b", "a b", "a_b", "ä", "a/b", "*", ">", "..", "a\n", "a;b", "$x", "a\x00",
		strings.Repeat("x", MaxNameLength+1),
	} {
		require.ErrorIs(t, CheckName(name), ErrInvalidName, "%q", name)
	}
}

func TestLinkID(t *testing.T) {
	id := LinkID{Placement: ID{Workload: "shop", Node: "node-1"}, Port: 8080}
	got, err := ParseLinkID(id.String())
	require.NoError(t, err)
	require.Equal(t, id, got)
	require.Equal(t, "shop.workload.opfield.internal", id.ServerName())
	service := ServiceLink(ServiceRegistry)
	require.Equal(t, "service/registry", service.String())
	got, err = ParseLinkID("service/registry")
	require.NoError(t, err)
	require.Equal(t, service, got)
	for _, s := range []string{"service/", "service", "service/a/b", "service/A", "service/registry/80", "", "shop/80", "shop.node-1", "shop.node-1/0", "shop.node-1/65536", "shop.node-1/080", "shop.node-1/+80", "a.b.c/80", "Shop.node-1/80"} {
		_, err := ParseLinkID(s)
		require.ErrorIs(t, err, ErrInvalidLink, "%q", s)
	}
}

// RTE-2: names cannot collide: a-b and c is not a and b-c.
func TestID_DoesNotCollide(t *testing.T) {
	require.NotEqual(t, ID{"a-b", "c"}.String(), ID{"a", "b-c"}.String())
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?`)
		a := ID{name.Draw(t, "aw"), name.Draw(t, "an")}
		b := ID{name.Draw(t, "bw"), name.Draw(t, "bn")}
		require.Equal(t, a == b, a.String() == b.String())
	})
}

// EVT-1, EVT-2: CloudEvents 1.0 on the placement's own subject.
func TestEvent_Marshal(t *testing.T) {
	b, err := good().Marshal()
	require.NoError(t, err)
	var env map[string]any
	require.NoError(t, json.Unmarshal(b, &env))
	require.Equal(t, "1.0", env["specversion"])
	require.Equal(t, "opfield.placement.health.v1", env["type"])
	require.Equal(t, "/opfield/node/node-1", env["source"])
	require.Equal(t, "shop.node-1.7.9", env["id"])
	require.Equal(t, "application/json", env["datacontenttype"])
	require.Equal(t, "opfield.placement.v1.shop.node-1", good().ID().Subject())
	got, err := UnmarshalEvent(b)
	require.NoError(t, err)
	require.Equal(t, good(), got)
}

// EVT-2: unknown fields are ignored, an unknown major version is refused.
func TestUnmarshalEvent_Versions(t *testing.T) {
	b, err := good().Marshal()
	require.NoError(t, err)
	more := strings.Replace(string(b), `"ready":true`, `"ready":true,"later":{"x":[1]}`, 1)
	more = strings.Replace(more, `"specversion"`, `"extension":"y","specversion"`, 1)
	got, err := UnmarshalEvent([]byte(more))
	require.NoError(t, err)
	require.Equal(t, good(), got)
	for _, change := range [][2]string{
		{"opfield.placement.health.v1", "opfield.placement.health.v2"},
		{`"specversion":"1.0"`, `"specversion":"2.0"`},
	} {
		_, err := UnmarshalEvent([]byte(strings.Replace(string(b), change[0], change[1], 1)))
		require.ErrorIs(t, err, ErrVersion)
	}
}

func TestEvent_CheckNamesTheField(t *testing.T) {
	for field, change := range map[string]func(*Event){
		"workload":          func(e *Event) { e.Workload = "Shop" },
		"node":              func(e *Event) { e.Node = "" },
		"placement":         func(e *Event) { e.Placement = "shop.node-2" },
		"kind":              func(e *Event) { e.Kind = "vm" },
		"role":              func(e *Event) { e.Role = "leader" },
		"state":             func(e *Event) { e.State = "fine" },
		"reason":            func(e *Event) { e.Reason = strings.Repeat("x", MaxReasonLength+1) },
		"ports":             func(e *Event) { e.Ports = make([]Port, MaxPorts+1) },
		"ports[0].port":     func(e *Event) { e.Ports[0].Port = 0 },
		"ports[1].protocol": func(e *Event) { e.Ports[1].Protocol = "udp" },
	} {
		e := good()
		e.Ports = append([]Port(nil), e.Ports...)
		change(&e)
		require.ErrorIs(t, e.Check(), ErrInvalidEvent, field)
		require.ErrorContains(t, e.Check(), field)
		_, err := e.Marshal()
		require.Error(t, err, field)
	}
}

// EVT-3: generation before epoch before sequence; clocks never count.
func TestOrder(t *testing.T) {
	ordered := []Order{
		{},
		{Sequence: Sequence{0, 1}},
		{Sequence: Sequence{1, 0}},
		{Epoch: 1},
		{Epoch: 1, Sequence: Sequence{9, 9}},
		{Generation: 1},
		{Generation: 1, Epoch: 1},
	}
	for i, a := range ordered {
		for j, b := range ordered {
			require.Equal(t, i > j, a.Newer(b), "%d %d", i, j)
		}
	}
	late := good()
	late.ObservedAt = late.ObservedAt.Add(time.Hour)
	require.False(t, late.Order().Newer(good().Order()))
}

func FuzzUnmarshalEvent(f *testing.F) {
	b, _ := good().Marshal()
	f.Add(b)
	f.Add([]byte(`{}`))
	f.Add([]byte(`{"specversion":"1.0","type":"opfield.placement.health.v1","data":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := UnmarshalEvent(b)
		if err != nil {
			return
		}
		out, err := e.Marshal()
		require.NoError(t, err)
		again, err := UnmarshalEvent(out)
		require.NoError(t, err)
		require.Equal(t, e.Order(), again.Order())
		require.Equal(t, e.ID(), again.ID())
	})
}
