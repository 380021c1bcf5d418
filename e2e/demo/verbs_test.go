package demo

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/system"
)

// What the person asks for in vain is told and does not end the demo.
func TestAttempt(t *testing.T) {
	d := &Demo{host: &host{out: io.Discard}}
	err := d.attempt(func() error { d.host.Fatalf("waited %v in vain", time.Minute); return nil })
	require.EqualError(t, err, "waited 1m0s in vain")
	require.Empty(t, d.host.reason, "the demo is not judged by it")
	require.NoError(t, d.attempt(func() error { return nil }))
	require.PanicsWithValue(t, "a mistake", func() { _ = d.attempt(func() error { panic("a mistake") }) })
}

func TestVerbs_Twice(t *testing.T) {
	d := &Demo{host: &host{out: io.Discard}, sys: &system.System{Nodes: []*system.Node{{ID: "node-1"}}}}
	require.ErrorContains(t, d.heal("node-1"), "node-1 is not cut off")
	d.cuts = []cut{{node: "node-1", from: time.Now()}}
	_, err := d.cut("node-1")
	require.ErrorContains(t, err, "node-1 is cut off already")
	_, err = d.cut("node-7")
	require.ErrorContains(t, err, "no node")
}
