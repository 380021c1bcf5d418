package ingress

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/opfield/availability/ingress/apply"
)

// runner turns the loop: everything that waits is taken in, then one round.
type runner struct {
	loop    *loop
	inbox   *Inbox
	applier *apply.Applier
	kick    chan struct{} // the watched paths may have changed
	saves   chan state    // one waits while one is written

	mu    sync.Mutex // guards paths
	paths []string
}

func (r *runner) run(ctx context.Context, results <-chan result) error {
	l := r.loop
	alive, save, show := time.NewTicker(aliveEvery), time.NewTicker(saveEvery), time.NewTicker(showEvery)
	defer alive.Stop()
	defer save.Stop()
	defer show.Stop()
	due := time.NewTimer(time.Hour)
	defer due.Stop()
	changed := true // the restored state
	for {
		if changed {
			l.round(time.Now())
			changed = false
		}
		if at, ok := l.schedule.Due(); ok {
			due.Reset(max(0, time.Until(at)))
		} else {
			due.Stop()
		}
		select {
		case <-ctx.Done():
			l.publish()
			close(r.saves)
			return nil
		case f := <-r.inbox.queue:
			f(l)
			r.drain()
			changed = true
		case res := <-results:
			l.ended(time.Now(), res)
			changed = true
			if res.changed { // a process that starts after a crash must know it
				r.keep()
			}
		case <-due.C:
			if at, ok := l.schedule.Due(); ok && !at.After(time.Now()) {
				l.begin()
				changed = true
			}
		case <-alive.C:
			if l.state.Known && !l.config.Render.Include && !l.schedule.Pending() && !r.applier.Alive() {
				l.config.Logger.Warn("nginx is gone and is started again")
				l.schedule.Note(time.Now(), apply.Prompt)
			}
		case <-save.C:
			l.forget(time.Now())
			r.keep()
		case <-show.C:
			if l.nginxDirty {
				l.consider(time.Now())
			}
			if l.statusDirty {
				l.statusDirty = false
				l.publish()
			}
			if l.routesMoved {
				l.routesMoved = false
				r.share()
			}
		}
	}
}

// keep has the state written, unless one waits to be.
func (r *runner) keep() {
	if r.loop.stateDirty && len(r.saves) == 0 {
		r.saves <- r.loop.snapshot()
	}
}

// save writes states, and the last one when the loop has ended.
func (r *runner) save() error {
	dir, log := r.loop.config.StateDir, r.loop.config.Logger
	for s := range r.saves {
		if err := writeState(dir, s); err != nil {
			log.Error("last state cannot be stored", "err", err)
		}
	}
	if err := writeState(dir, r.loop.snapshot()); err != nil {
		return fmt.Errorf("store last state: %w", err)
	}
	return nil
}

// drain takes what else waits, at most one queue full.
func (r *runner) drain() {
	for range inboxSize {
		select {
		case f := <-r.inbox.queue:
			f(r.loop)
		default:
			return
		}
	}
}

// share copies what the watcher looks at.
func (r *runner) share() {
	r.mu.Lock()
	r.paths = r.loop.watchedPaths()
	r.mu.Unlock()
	select {
	case r.kick <- struct{}{}:
	default:
	}
}

func (r *runner) watched() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.paths
}

func (r *runner) probe(ctx context.Context, p Prober, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			targets := make(chan []target, 1)
			r.inbox.put(func(l *loop) { targets <- l.targets() })
			var all []target
			select {
			case all = <-targets:
			case <-ctx.Done():
				return nil
			}
			got := probeAll(ctx, p, all)
			if ctx.Err() != nil {
				return nil
			}
			r.inbox.put(func(l *loop) { l.probed = got })
		}
	}
}
