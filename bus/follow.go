package bus

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	relistEvery = 30 * time.Second
	relistAfter = 500 * time.Millisecond // a failed list
	coalesceFor = 20 * time.Millisecond
	// liveQueue holds the messages that arrive while a callback works: two
	// events for each of 10,000 placements. What does not fit is dropped by
	// the client and repaired by the next full list.
	liveQueue = 20_000
)

// feed says what to follow.
type feed struct {
	stream, filter string                         // what is listed
	live           string                         // what is subscribed
	onLive         func(*nats.Msg) (changed bool) // changed: list what is new
	onList         func(msgs []stored, full bool)
}

type listing struct {
	msgs []stored
	last uint64
	full bool
	err  error
}

// follow runs a feed until ctx ends. The list runs beside the loop, so live
// messages are never delayed by a JetStream that does not answer.
func (c *Conn) follow(ctx context.Context, f feed) error {
	live := make(chan *nats.Msg, liveQueue)
	sub, err := c.nc.ChanSubscribe(f.live, live)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe()

	results := make(chan listing, 1)
	busy := false
	defer func() {
		if busy {
			<-results
		}
	}()
	var last uint64
	wantFull, wantNew := true, false
	ready := time.NewTimer(0) // when the next wanted list may begin
	defer ready.Stop()
	full := time.NewTicker(relistEvery)
	defer full.Stop()
	connected := c.nextConnect()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case m := <-live:
			if f.onLive(m) && !wantNew {
				wantNew = true
				ready.Reset(coalesceFor)
			}
		case <-connected:
			connected = c.nextConnect()
			wantFull = true
			ready.Reset(0)
		case <-full.C:
			wantFull = true
			ready.Reset(0)
		case <-ready.C:
			if busy || !wantFull && !wantNew {
				continue
			}
			from := last + 1
			if wantFull {
				from = 1
			}
			busy, wantFull, wantNew = true, false, false
			go func() {
				msgs, last, err := c.list(ctx, f.stream, f.filter, from)
				results <- listing{msgs: msgs, last: last, full: from == 1, err: err}
			}()
		case r := <-results:
			busy = false
			if r.err != nil {
				c.logger.Debug("list again later", "stream", f.stream, "err", r.err)
				wantFull = true
				ready.Reset(relistAfter)
				continue
			}
			last = r.last
			f.onList(r.msgs, r.full)
			if wantFull || wantNew {
				ready.Reset(coalesceFor)
			}
		}
	}
}
