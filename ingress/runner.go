package ingress

import (
	"context"
	"slices"
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

	mu      sync.Mutex // guards the copies for other goroutines
	paths   []string
	targets []target
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
			l.save()
			l.publish()
			return nil
		case f := <-r.inbox.queue:
			f(l)
			r.drain()
			changed = true
		case res := <-results:
			l.ended(time.Now(), res)
			changed = true
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
			if l.stateDirty {
				l.save()
			}
		case <-show.C:
			if l.statusDirty {
				l.statusDirty = false
				l.publish()
				r.share()
			}
		}
	}
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

// share copies what other goroutines look at.
func (r *runner) share() {
	paths, targets := r.loop.watchedPaths(), r.loop.targets()
	r.mu.Lock()
	moved := !slices.Equal(paths, r.paths)
	r.paths, r.targets = paths, targets
	r.mu.Unlock()
	if moved {
		select {
		case r.kick <- struct{}{}:
		default:
		}
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
			r.mu.Lock()
			targets := r.targets
			r.mu.Unlock()
			got := probeAll(ctx, p, targets)
			if ctx.Err() != nil {
				return nil
			}
			r.inbox.put(func(l *loop) { l.probed = got })
		}
	}
}
