package bus

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/opfield/availability/placement"
)

const (
	keepEvery = 30 * time.Second
	keepAfter = time.Second // bounds how often one subject is repaired
	keepQueue = 4096        // foreign messages not looked at; the next full round repairs
)

// remember notes what KeepPlacements keeps. An older event than the one
// remembered is not.
func (c *Conn) remember(e placement.Event, data []byte) {
	c.keepMu.Lock()
	defer c.keepMu.Unlock()
	if old, ok := c.kept[e.ID()]; !ok || !old.order.Newer(e.Order()) {
		c.kept[e.ID()] = kept{order: e.Order(), data: data, removed: e.State == placement.StateRemoved}
	}
}

// kept is the newest event that was handed to PublishPlacement.
type kept struct {
	order   placement.Order
	data    []byte
	removed bool
}

// KeepPlacements keeps the stored events of this node what PublishPlacement
// said last, until ctx ends: after each connect and every 30 s all of them
// are sent again, and one whose subject carries something else (a stolen
// identity can make the server write its answers there) within a second. It
// is for nodes.
func (c *Conn) KeepPlacements(ctx context.Context) error {
	msgs := make(chan *nats.Msg, keepQueue)
	sub, err := c.nc.ChanSubscribe(placement.SubjectPrefix+"*."+c.identity.Name().ID, msgs)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe()
	all := time.NewTicker(keepEvery)
	defer all.Stop()
	soon := time.NewTimer(keepAfter)
	defer soon.Stop()
	foreign := map[string]bool{}
	connected := c.nextConnect()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case m := <-msgs:
			if c.isForeign(m) && !foreign[m.Subject] {
				foreign[m.Subject] = true
				soon.Reset(keepAfter)
			}
		case <-soon.C:
			c.sendKept(func(id placement.ID, _ kept) bool { return foreign[id.Subject()] })
			clear(foreign)
		case <-connected:
			connected = c.nextConnect()
			c.sendKept(func(_ placement.ID, k kept) bool { return !k.removed })
		case <-all.C:
			c.sendKept(func(_ placement.ID, k kept) bool { return !k.removed }) // its time to live would begin again
		}
	}
}

// isForeign reports whether a message on a subject of this node is not one
// that this connection sent.
func (c *Conn) isForeign(m *nats.Msg) bool {
	e, err := decodePlacement(m.Subject, m.Data)
	if err != nil || m.Header.Get("Nats-Stream") != "" {
		return true
	}
	c.keepMu.Lock()
	defer c.keepMu.Unlock()
	k, ok := c.kept[e.ID()]
	return ok && e.Order().Newer(k.order)
}

// sendKept sends while it holds the lock: PublishPlacement remembers under it
// before it sends, so an older event is never sent after a newer one.
func (c *Conn) sendKept(which func(placement.ID, kept) bool) {
	c.keepMu.Lock()
	defer c.keepMu.Unlock()
	for id, k := range c.kept {
		if !which(id, k) {
			continue
		}
		msg := placementMessage(id, k.data, k.removed)
		if err := c.nc.PublishMsg(msg); err != nil {
			return // not connected: the next connect sends all
		}
	}
}
