package node

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/opfield/availability/placement"
)

var errSuperseded = errors.New("a stored event is as new")

// outbox publishes the newest event of every placement until it is stored.
// Each placement with something to publish has its own goroutine, so one that
// is refused delays no other; a newer event replaces an older one that waits.
type outbox struct {
	publisher  Publisher
	logger     *slog.Logger
	superseded func(stored placement.Event) // a stored event is as new as ours
	delivered  func(placement.Event)        // the event is stored
	metrics    *metrics

	work chan string // placements that got something to do; Run starts them

	mu      sync.Mutex
	pending map[string]*letter // by placement; one for each goroutine
	checked map[string]bool    // the store was asked for the last event
}

// letter is the work of one goroutine.
type letter struct {
	event  placement.Event
	cancel context.CancelFunc // ends the present attempt or wait: something newer is there
}

func newOutbox(publisher Publisher, logger *slog.Logger, superseded, delivered func(placement.Event), m *metrics) *outbox {
	return &outbox{
		publisher: publisher, logger: logger, superseded: superseded, delivered: delivered, metrics: m,
		work: make(chan string, 1024), pending: map[string]*letter{}, checked: map[string]bool{},
	}
}

// put replaces what waits for the event's placement. It blocks only while
// more than 1024 placements change at the same moment.
func (o *outbox) put(ctx context.Context, e placement.Event) {
	o.mu.Lock()
	l, running := o.pending[e.Placement]
	if running {
		l.event = e
		l.cancel()
		o.mu.Unlock()
		return
	}
	o.pending[e.Placement] = &letter{event: e, cancel: func() {}}
	o.mu.Unlock()
	select {
	case o.work <- e.Placement:
	case <-ctx.Done():
	}
}

// Run publishes until the context ends.
func (o *outbox) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case name := <-o.work:
			wg.Go(func() { o.deliver(ctx, name) })
		}
	}
}

// deliver works on one placement until nothing newer waits.
func (o *outbox) deliver(ctx context.Context, name string) {
	wait := publishRetry
	for ctx.Err() == nil {
		current, cancel := context.WithCancel(ctx)
		o.mu.Lock()
		l := o.pending[name]
		l.cancel = cancel
		e := l.event
		o.mu.Unlock()

		attempt, end := context.WithTimeout(current, publishLimit)
		err := o.publish(attempt, e)
		end()
		if err != nil && current.Err() == nil {
			o.metrics.failures.Inc()
			o.logger.Warn("event not published, trying again", "placement", name, "err", err)
			select {
			case <-current.Done():
			case <-time.After(wait):
			}
			wait = min(2*wait, publishRetries)
		}

		o.mu.Lock()
		newer := l.event.Sequence != e.Sequence
		done := err == nil && !newer
		if done {
			delete(o.pending, name)
		}
		o.mu.Unlock()
		cancel()
		if done {
			o.metrics.published.Inc()
			o.delivered(e)
			return
		}
		if newer {
			wait = publishRetry
		}
	}
}

// publish sends one event. Before the first one of a placement the stored one
// is read, because publishing replaces it.
func (o *outbox) publish(ctx context.Context, e placement.Event) error {
	o.mu.Lock()
	checked := o.checked[e.Placement]
	o.mu.Unlock()
	if !checked {
		stored, found, err := o.publisher.LastPlacement(ctx, e.ID())
		if err != nil {
			return err
		}
		if found && stored.Sequence.Incarnation >= e.Sequence.Incarnation {
			o.superseded(stored)
			return errSuperseded // until the renumbered event replaces this one
		}
		o.mu.Lock()
		o.checked[e.Placement] = true
		o.mu.Unlock()
	}
	return o.publisher.PublishPlacement(ctx, e)
}
