package main

import (
	"context"

	"github.com/opfield/availability/bus"
)

// source is the control plane as the ingress loop hears it.
type source struct{ *bus.Conn }

// FollowNodes passes on which nodes are lost.
func (s source) FollowNodes(ctx context.Context, fn func(node string, lost bool, revision uint64)) error {
	return s.Conn.FollowNodes(ctx, func(e bus.NodeEvent) { fn(e.Node, e.State == bus.NodeOffline, e.Number) })
}
