package engine

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/opfield/availability/bus"
)

// The lease of the leader. Only times of our own clock are compared: a lease
// whose record did not change for takeoverAfter is not renewed any more. The
// documents are written with compare-and-set besides, so that even two leaders
// could not undo each other's decisions.
const (
	renewEvery    = 2 * time.Second
	renewWithin   = 2 * time.Second
	stepDownAfter = 6 * time.Second // without a successful renewal
	takeoverAfter = 9 * time.Second
	leaseKey      = "policies"
)

// lease is the record.
type lease struct {
	Instance string `json:"instance"` // empty: nobody leads
	Number   uint64 `json:"number"`   // of the renewal
}

// compete takes the lease, leads while it holds it, and begins again.
func (e *Engine) compete(ctx context.Context) error {
	alone := e.cfg.Alone // the first record there is is that of the process before
	var seen uint64      // revision of the record
	var since time.Time  // when it was seen first
	var mine uint64      // our last number
	for ctx.Err() == nil {
		held, revision, err := e.readLease(ctx)
		if err == nil && !alone && held.Instance != "" && held.Instance != e.cfg.Instance {
			e.yield()
		}
		switch {
		case err != nil:
			if !e.cfg.Nodes.Connected() {
				since = time.Now() // what was not seen cannot have been silent
			}
		case alone || held.Instance == "" || held.Instance == e.cfg.Instance || revision == seen && time.Since(since) >= takeoverAfter:
			mine++
			if next, err := e.writeLease(ctx, lease{e.cfg.Instance, mine}, revision); err == nil {
				alone = false
				e.hold(ctx, &mine, next)
				seen, since = 0, time.Now()
				continue
			}
		case revision != seen:
			seen, since = revision, time.Now()
		}
		e.idle(ctx, againAfter)
	}
	return ctx.Err()
}

// idle takes what nodes say while another controller leads, and refuses
// requests.
func (e *Engine) idle(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			return
		case r := <-e.reports:
			e.mu.Lock()
			e.nodes[r.Node] = r
			e.mu.Unlock()
		case call := <-e.calls:
			stopped, cancel := context.WithCancelCause(ctx)
			cancel(errNotLeading)
			_ = call(stopped) // refused
		}
	}
}

// hold leads and renews the lease beside it.
func (e *Engine) hold(ctx context.Context, number *uint64, revision uint64) {
	e.audit(bus.AuditEvent{Kind: bus.AuditTakeover, Text: "controller " + e.cfg.Instance + " decides about policies from now on"})
	turn, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer cancel()
		last := time.Now()
		tick := time.NewTicker(renewEvery)
		defer tick.Stop()
		for {
			select {
			case <-turn.Done():
				return
			case <-tick.C:
			}
			*number++
			next, err := e.writeLease(turn, lease{e.cfg.Instance, *number}, revision)
			switch {
			case err == nil:
				revision, last = next, time.Now()
			case errors.Is(err, bus.ErrConflict):
				// Our own write may have come through although its answer did not.
				held, now, err := e.readLease(turn)
				if err != nil || held.Instance != e.cfg.Instance {
					e.cfg.Logger.Warn("another controller leads now")
					return
				}
				revision, last = now, time.Now()
			case time.Since(last) >= stepDownAfter:
				e.cfg.Logger.Warn("the lease of the leader could not be renewed", "err", err)
				return
			}
		}
	}()
	for turn.Err() == nil {
		if err := e.lead(turn); err != nil && turn.Err() == nil {
			e.cfg.Logger.Warn("what is stored is read again", "err", err)
			if held, _, err := e.readLease(turn); err == nil && held.Instance != e.cfg.Instance {
				e.cfg.Logger.Warn("another controller leads now")
				break
			}
			e.idle(turn, againAfter)
		}
	}
	cancel()
	<-done
	if ctx.Err() != nil {
		e.release(context.WithoutCancel(ctx), *number, revision)
	}
}

// release gives the lease up, so that nobody waits for it to run out. Nothing
// is written any more by this turn.
func (e *Engine) release(ctx context.Context, number, revision uint64) {
	free := lease{Number: number + 1}
	_, err := e.writeLease(ctx, free, revision)
	if errors.Is(err, bus.ErrConflict) { // by a renewal of ours that was under way, or by another controller
		held, now, readErr := e.readLease(ctx)
		if readErr == nil && held.Instance == e.cfg.Instance {
			_, err = e.writeLease(ctx, free, now)
		}
	}
	if err != nil {
		e.cfg.Logger.Debug("the lease of the leader runs out by itself", "err", err)
	}
}

func (e *Engine) readLease(ctx context.Context) (lease, uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, renewWithin)
	defer cancel()
	all, err := e.cfg.Store.Read(ctx, bus.BucketLeader)
	if err != nil {
		return lease{}, 0, err
	}
	var l lease
	entry, ok := all[leaseKey]
	if ok {
		err = json.Unmarshal(entry.Value, &l)
	}
	return l, entry.Revision, err
}

func (e *Engine) writeLease(ctx context.Context, l lease, revision uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, renewWithin)
	defer cancel()
	data, err := json.Marshal(l)
	if err != nil {
		return 0, err
	}
	return e.cfg.Store.Swap(ctx, bus.BucketLeader, leaseKey, data, revision)
}
