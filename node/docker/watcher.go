// Package docker follows the labelled and the managed containers of a Docker
// engine and keeps a snapshot of them for discovery, and lists all the others
// beside them.
//
// Events make it fast, full lists make it right: one follows every connection
// to the engine and every 30 s. Each call has a deadline and its own
// goroutine, so an engine or a container that hangs delays nobody else; what
// the engine does not answer changes nothing. It changes nothing in Docker.
package docker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/filters"

	"github.com/opfield/availability/node/discovery"
)

// Engine is the part of the Docker client that is used.
type Engine interface {
	ContainerList(context.Context, container.ListOptions) ([]container.Summary, error)
	ContainerInspect(context.Context, string) (container.InspectResponse, error)
	Events(context.Context, events.ListOptions) (<-chan events.Message, <-chan error)
}

// Inspector is the part of an Engine that describes one container.
type Inspector interface {
	ContainerInspect(context.Context, string) (container.InspectResponse, error)
}

// Container is a watched container and the start it belongs to: what was
// found out about an earlier start does not count.
type Container struct {
	discovery.Container
	StartedAt time.Time
	// Pending says that the engine was not yet given the time to answer about
	// it for the first time.
	Pending bool
}

// Snapshot is all that is known at one moment.
type Snapshot struct {
	Containers []Container // sorted by id
	Complete   bool        // a whole list was read: what is missing does not exist
	Err        error       // why the engine does not answer at the moment
	Listed     []Listed    // every container of the last list, sorted by id; not to be changed
}

// Config of a Watcher.
type Config struct {
	Engine Engine
	Logger *slog.Logger
	// Changed is called with every new snapshot, from one goroutine. The
	// first call follows the first complete list, or the first error.
	Changed func(Snapshot)
	// Owned reports whether a container is watched although it has no label;
	// nil: none. It may be called at any time.
	Owned func(id string) bool
}

// Watcher follows one engine.
type Watcher struct {
	config Config

	// The inbox of Run. Senders wait, because Run never waits for them.
	connected chan error // nil: the event stream is being opened; else it broke
	events    chan events.Message
	listed    chan list
	inspected chan inspection
	due       chan string   // container ids to look at again
	fresh     chan struct{} // capacity 1: Owned may say something else

	// Owned by Run.
	entries   map[string]*entry
	complete  bool            // a whole list was read
	waiting   map[string]bool // containers that a list told of and that were not answered yet
	listing   bool
	listAgain bool
	all       bool // the next list inspects every container
	soon      bool // a list is due after an event
	others    []Listed
	err       error
	lost      time.Time // the last break of the stream: the engine went away
	changed   bool
}

type list struct {
	summaries []container.Summary
	began     time.Time
	all       bool
	err       error
}

// New checks the configuration and starts nothing.
func New(config Config) (*Watcher, error) {
	if config.Engine == nil || config.Logger == nil || config.Changed == nil {
		return nil, errors.New("docker watcher: engine, logger and changed are required")
	}
	if config.Owned == nil {
		config.Owned = func(string) bool { return false }
	}
	return &Watcher{
		config: config, connected: make(chan error), events: make(chan events.Message),
		listed: make(chan list), inspected: make(chan inspection), due: make(chan string), fresh: make(chan struct{}, 1),
		entries: map[string]*entry{}, waiting: map[string]bool{},
	}, nil
}

// Refresh looks which containers are watched now.
func (w *Watcher) Refresh() {
	select {
	case w.fresh <- struct{}{}:
	default:
	}
}

// watched reports whether a container is labelled or owned.
func (w *Watcher) watched(id string, labels map[string]string) bool {
	_, labelled := labels[discovery.LabelWorkload]
	return labelled || w.config.Owned(id)
}

// Run follows the engine until the context ends.
func (w *Watcher) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() { w.stream(ctx) })
	tick := time.NewTicker(listEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-w.connected:
			if err != nil {
				w.lost = time.Now()
				w.setErr(err)
			} else { // the answer to the list tells whether the engine is there
				w.all = true
				w.list(ctx, &wg)
			}
		case <-tick.C:
			w.list(ctx, &wg)
		case m := <-w.events:
			w.event(ctx, &wg, m)
		case l := <-w.listed:
			w.merge(ctx, &wg, l)
		case i := <-w.inspected:
			w.learn(ctx, &wg, i)
		case id := <-w.due:
			w.inspect(ctx, &wg, id)
		case <-w.fresh:
			w.list(ctx, &wg)
		}
		if w.changed && (w.complete || w.err != nil) {
			w.changed = false
			w.config.Changed(w.snapshot())
		}
	}
}

// stream keeps the event stream open and passes its messages on.
func (w *Watcher) stream(ctx context.Context) {
	wait := retryMin
	for ctx.Err() == nil {
		opened := time.Now()
		err := w.streamOnce(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(opened) > retryMax {
			wait = retryMin
		}
		send(ctx, w.connected, fmt.Errorf("follow Docker events: %w", err))
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, retryMax)
	}
}

func (w *Watcher) streamOnce(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Since closes the gap between the engine's answer and its subscription:
	// it replays what happened meanwhile, in order.
	now := time.Now()
	// The engine answers with the first event only (20.10), so the list cannot
	// wait for it: it is asked for now.
	if !send(ctx, w.connected, nil) {
		return ctx.Err()
	}
	messages, errs := w.config.Engine.Events(ctx, events.ListOptions{
		Since: fmt.Sprintf("%d.%09d", now.Unix(), now.Nanosecond()),
		Filters: filters.NewArgs(
			filters.Arg("type", string(events.ContainerEventType)), filters.Arg("type", string(events.NetworkEventType)),
			filters.Arg("event", "create"), filters.Arg("event", "start"), filters.Arg("event", "restart"),
			filters.Arg("event", "kill"), filters.Arg("event", "die"), filters.Arg("event", "oom"), filters.Arg("event", "stop"),
			filters.Arg("event", "pause"), filters.Arg("event", "unpause"), filters.Arg("event", "destroy"),
			filters.Arg("event", "rename"), filters.Arg("event", "update"), filters.Arg("event", "health_status"),
			filters.Arg("event", "connect"), filters.Arg("event", "disconnect"),
		),
	})
	for {
		select {
		case m := <-messages:
			if !send(ctx, w.events, m) {
				return ctx.Err()
			}
		case err := <-errs:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// list asks for all containers, one call at a time.
func (w *Watcher) list(ctx context.Context, wg *sync.WaitGroup) {
	if w.listing {
		w.listAgain = true
		return
	}
	w.listing = true
	all := w.all
	w.all = false
	wg.Go(func() {
		l := list{began: time.Now(), all: all}
		call, cancel := context.WithTimeout(ctx, listLimit)
		defer cancel()
		l.summaries, l.err = w.config.Engine.ContainerList(call, container.ListOptions{All: true})
		send(ctx, w.listed, l)
	})
}

// merge compares a list with what is known.
func (w *Watcher) merge(ctx context.Context, wg *sync.WaitGroup, l list) {
	w.listing = false
	if w.listAgain {
		w.listAgain = false
		w.list(ctx, wg)
	}
	if l.err != nil {
		w.all = w.all || l.all
		w.setErr(fmt.Errorf("list containers: %w", l.err))
		if !w.complete {
			w.later(ctx, wg, retryMax, "") // an empty id asks for a list
		}
		return
	}
	w.setErr(nil)
	if all := listed(l.summaries); !reflect.DeepEqual(all, w.others) {
		w.others, w.changed = all, true
	}
	there := map[string]bool{}
	for _, s := range l.summaries {
		if !w.watched(s.ID, s.Labels) {
			continue
		}
		there[s.ID] = true
		e := w.entries[s.ID]
		fresh := e == nil
		if fresh {
			e = newEntry(s)
			w.entries[s.ID] = e
			w.changed = true
		}
		if l.all || !e.agrees(s) {
			if !w.complete || fresh {
				w.waiting[s.ID] = true
			}
			w.inspect(ctx, wg, s.ID)
		}
	}
	if !w.complete {
		w.complete, w.changed = true, true
	}
	for id, e := range w.entries {
		if !there[id] && e.touched.Before(l.began) {
			w.drop(id)
		}
	}
}

// event applies what the engine announced, before it is asked for the rest.
func (w *Watcher) event(ctx context.Context, wg *sync.WaitGroup, m events.Message) {
	id := m.Actor.ID
	if m.Type == events.NetworkEventType {
		id = m.Actor.Attributes["container"]
	} else if !w.soon { // what a list says of every container may have changed
		w.soon = true
		w.later(ctx, wg, listAfter, "")
	}
	e := w.entries[id]
	if e == nil {
		if !w.watched(id, m.Actor.Attributes) || m.Action == events.ActionDestroy {
			return
		}
		e = newEntry(container.Summary{ID: id, Labels: m.Actor.Attributes, Names: []string{m.Actor.Attributes["name"]}})
		e.bare = true
		w.entries[id] = e
	}
	if m.Action == events.ActionDestroy {
		w.drop(id)
		return
	}
	hold := e.apply(m, time.Now())
	w.changed = true
	if hold > 0 {
		w.later(ctx, wg, hold, id)
	}
	w.inspect(ctx, wg, id)
}

// inspect asks for one container, one call at a time each.
func (w *Watcher) inspect(ctx context.Context, wg *sync.WaitGroup, id string) {
	if id == "" {
		w.soon = false
		w.list(ctx, wg)
		return
	}
	e := w.entries[id]
	if e == nil {
		return
	}
	if e.inspecting {
		e.again = true
		return
	}
	e.inspecting = true
	version := e.version
	wg.Go(func() {
		i := inspection{id: id, version: version}
		call, cancel := context.WithTimeout(ctx, inspectLimit)
		defer cancel()
		i.found, i.err = w.config.Engine.ContainerInspect(call, id)
		if i.err == nil {
			i.addr = Address(call, w.config.Engine, i.found)
		}
		send(ctx, w.inspected, i)
	})
}

// learn takes the answer about one container.
func (w *Watcher) learn(ctx context.Context, wg *sync.WaitGroup, i inspection) {
	if w.waiting[i.id] {
		delete(w.waiting, i.id)
		w.changed = true
	}
	e := w.entries[i.id]
	if e == nil {
		return
	}
	e.inspecting = false
	again := e.again
	e.again = false
	switch {
	case cerrdefs.IsNotFound(i.err):
		w.drop(i.id)
		return
	case i.err != nil:
		w.config.Logger.Warn("container not inspected", "container", e.c.Name, "err", i.err)
		w.later(ctx, wg, recheckAfter, i.id)
	case i.version != e.version:
		again = true // something happened after the question
	default:
		if e.learn(i, w.lost, time.Now()) {
			w.changed = true
		}
	}
	if again {
		w.inspect(ctx, wg, i.id)
	}
}

// later looks at a container again, or lists all if the id is empty.
func (w *Watcher) later(ctx context.Context, wg *sync.WaitGroup, after time.Duration, id string) {
	wg.Go(func() {
		select {
		case <-ctx.Done():
		case <-time.After(after):
			send(ctx, w.due, id)
		}
	})
}

func (w *Watcher) drop(id string) {
	delete(w.entries, id)
	delete(w.waiting, id)
	w.changed = true
}

func (w *Watcher) setErr(err error) {
	if (err == nil) != (w.err == nil) {
		w.changed = true
		if err != nil {
			w.config.Logger.Warn("engine does not answer", "err", err)
		} else {
			w.config.Logger.Info("engine answers again")
		}
	}
	w.err = err
}

func (w *Watcher) snapshot() Snapshot {
	s := Snapshot{Err: w.err, Complete: w.complete, Listed: w.others}
	for _, id := range slices.Sorted(maps.Keys(w.entries)) {
		if e := w.entries[id]; !e.bare {
			s.Containers = append(s.Containers, Container{Container: e.c, StartedAt: e.startedAt, Pending: w.waiting[id]})
		}
	}
	return s
}

// send gives up when the context ends.
func send[T any](ctx context.Context, c chan<- T, v T) bool {
	select {
	case c <- v:
		return true
	case <-ctx.Done():
		return false
	}
}
