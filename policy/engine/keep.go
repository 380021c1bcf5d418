package engine

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/opfield/availability/bus"
)

// keep writes the records of the nodes that changed, until ctx ends and
// everything it began has ended. It runs beside the loop: a node whose records
// cannot be written delays neither a decision nor another node.
func (e *Engine) keep(ctx context.Context) {
	var at work
	defer at.done.Wait()
	for {
		for node := range e.toKeep(&at) {
			at.begin(node)
			at.done.Go(func() {
				failed := e.keepNode(ctx, node)
				if failed != nil && ctx.Err() == nil {
					e.cfg.Logger.Warn("a node's records are written again later", "node", node, "err", failed)
					wait(ctx, againAfter)
				}
				at.end(node)
				e.mu.Lock()
				if failed != nil {
					e.unkept[node] = true
				}
				e.mu.Unlock()
				e.wakeKeeper()
			})
		}
		select {
		case <-ctx.Done():
			return
		case <-e.keepSoon:
		}
	}
}

// toKeep takes nodes whose records are to be written and that are not at work,
// as many as may be begun.
func (e *Engine) toKeep(at *work) map[string]bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[string]bool{}
	for node := range e.unkept {
		if at.free(node, len(out)) {
			out[node] = true
			delete(e.unkept, node)
		}
	}
	return out
}

// keepNode writes the records of one node as they are wanted now.
func (e *Engine) keepNode(ctx context.Context, node string) error {
	e.mu.Lock()
	want := maps.Clone(e.records[node])
	e.mu.Unlock()
	call, cancel := e.store(ctx)
	defer cancel()
	return e.cfg.Store.KeepDesired(call, node, want)
}

// wakeKeeper says that there may be something to keep.
func (e *Engine) wakeKeeper() {
	select {
	case e.keepSoon <- struct{}{}:
	default:
	}
}

// work is what the keeper has begun.
type work struct {
	done sync.WaitGroup
	mu   sync.Mutex
	at   map[string]bool // guarded by mu; by node
}

func (w *work) begin(node string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.at == nil {
		w.at = map[string]bool{}
	}
	w.at[node] = true
}

func (w *work) end(node string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.at, node)
}

// free reports whether one more may begin with this node.
func (w *work) free(node string, more int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.at[node] && len(w.at)+more < keepParallel
}

func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// repair has everything compared with what is stored: somebody else may have
// written, such as a controller that led before and was slow.
func (e *Engine) repair(ctx context.Context) error {
	call, cancel := e.store(ctx)
	defer cancel()
	members, err := e.cfg.Store.Read(call, bus.BucketMembers)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for name, en := range e.policies {
		if stored := string(members[name].Value); stored != e.members[name] {
			e.members[name], en.dirty = stored, true
		}
	}
	for node := range e.records {
		e.unkept[node] = true
	}
	return nil
}
