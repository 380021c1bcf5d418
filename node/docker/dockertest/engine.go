// Package dockertest is a Docker engine in memory for tests:
// containers, their events, and the ways an engine can fail to answer.
package dockertest

import (
	"context"
	"errors"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/network"
)

// Engine implements the engines of node/docker and node/carry.
type Engine struct {
	mu         sync.Mutex
	containers map[string]*container.InspectResponse
	streams    map[chan events.Message]chan error
	hanging    map[string]chan struct{} // container ids about which every call hangs
	down       error
	inspected  map[string]int

	images   map[string]bool                  // on the node, by any name
	pulls    map[string]func(io.Writer) error // how a reference is pulled
	pushes   func(ref string) error           // nil: there is no registry
	dying    map[string]bool                  // containers that end as soon as they start
	starts   map[string][]time.Time
	networks map[string]bool
	created  int
}

// New returns an engine without containers.
func New() *Engine {
	return &Engine{
		containers: map[string]*container.InspectResponse{}, streams: map[chan events.Message]chan error{},
		hanging: map[string]chan struct{}{}, inspected: map[string]int{},
		images: map[string]bool{}, pulls: map[string]func(io.Writer) error{}, dying: map[string]bool{},
		starts: map[string][]time.Time{}, networks: map[string]bool{},
	}
}

// Run adds a running container at 127.0.0.1 and announces its start.
func (e *Engine) Run(id string, labels map[string]string, edit ...func(*container.InspectResponse)) {
	c := &container.InspectResponse{
		ContainerJSONBase: &container.ContainerJSONBase{
			ID: id, Name: "/" + id, HostConfig: &container.HostConfig{NetworkMode: "bridge"},
			State: &container.State{Status: container.StateRunning, Running: true, StartedAt: time.Now().Format(time.RFC3339Nano)},
		},
		Config: &container.Config{Labels: labels},
		NetworkSettings: &container.NetworkSettings{Networks: map[string]*network.EndpointSettings{
			"bridge": {IPAddress: "127.0.0.1"},
		}},
	}
	for _, fn := range edit {
		fn(c)
	}
	e.mu.Lock()
	e.containers[id] = c
	e.mu.Unlock()
	e.Emit(id, events.ActionStart)
}

// Edit changes a container without an event.
func (e *Engine) Edit(id string, edit func(*container.InspectResponse)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	edit(e.containers[id])
}

// Remove takes a container away; the event is the caller's.
func (e *Engine) Remove(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.containers, id)
}

// Emit announces an event about a container; attributes are "key=value".
func (e *Engine) Emit(id string, action events.Action, attributes ...string) {
	e.mu.Lock()
	m := events.Message{Type: events.ContainerEventType, Action: action, TimeNano: time.Now().UnixNano(), Actor: events.Actor{ID: id, Attributes: map[string]string{"name": id}}}
	if c := e.containers[id]; c != nil {
		for key, value := range c.Config.Labels {
			m.Actor.Attributes[key] = value
		}
	}
	for _, a := range attributes {
		key, value, _ := strings.Cut(a, "=")
		m.Actor.Attributes[key] = value
	}
	var streams []chan events.Message
	for s := range e.streams {
		streams = append(streams, s)
	}
	e.mu.Unlock()
	for _, s := range streams {
		s <- m
	}
}

// Hang lets every call about a container hang until Release.
func (e *Engine) Hang(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.hanging[id] = make(chan struct{})
}

// Release undoes Hang.
func (e *Engine) Release(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	close(e.hanging[id])
	delete(e.hanging, id)
}

// Stop breaks every event stream and refuses every call until Start.
func (e *Engine) Stop() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.down = errors.New("cannot connect to the Docker daemon")
	for _, errs := range e.streams {
		errs <- e.down
	}
	clear(e.streams)
}

// Start undoes Stop.
func (e *Engine) Start() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.down = nil
}

// ContainerList implements the engine.
func (e *Engine) ContainerList(_ context.Context, options container.ListOptions) ([]container.Summary, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.down != nil {
		return nil, e.down
	}
	var list []container.Summary
	for id, c := range e.containers {
		if !options.Filters.MatchKVList("label", c.Config.Labels) {
			continue
		}
		list = append(list, container.Summary{
			ID: id, Names: []string{c.Name}, Labels: c.Config.Labels, State: c.State.Status, Image: c.Config.Image,
			Status: healthText(c.State.Health), Ports: ports(c.NetworkSettings),
			NetworkSettings: &container.NetworkSettingsSummary{Networks: c.NetworkSettings.Networks},
		})
	}
	return list, nil
}

// healthText is how a list words the result of a health check.
func healthText(h *container.Health) string {
	switch {
	case h == nil:
		return "Up 2 minutes"
	case h.Status == container.Starting:
		return "Up 2 minutes (health: starting)"
	default:
		return "Up 2 minutes (" + h.Status + ")"
	}
}

func ports(s *container.NetworkSettings) []container.Port {
	var out []container.Port
	for port, bindings := range s.Ports {
		p := container.Port{PrivatePort: uint16(port.Int()), Type: port.Proto()}
		if len(bindings) == 0 {
			out = append(out, p)
		}
		for _, b := range bindings {
			public, err := strconv.ParseUint(b.HostPort, 10, 16)
			if err != nil {
				panic(err) // the test is wrong
			}
			p.IP, p.PublicPort = b.HostIP, uint16(public)
			out = append(out, p)
		}
	}
	return out
}

// ContainerInspect implements the engine.
func (e *Engine) ContainerInspect(ctx context.Context, id string) (container.InspectResponse, error) {
	e.mu.Lock()
	e.inspected[id]++
	e.mu.Unlock()
	if err := e.pass(ctx, id); err != nil {
		return container.InspectResponse{}, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	c, err := e.findLocked(id)
	if err != nil {
		return container.InspectResponse{}, err
	}
	base, state, host := *c.ContainerJSONBase, *c.State, *c.HostConfig
	base.State, base.HostConfig = &state, &host
	return container.InspectResponse{ContainerJSONBase: &base, Config: c.Config, NetworkSettings: c.NetworkSettings}, nil
}

// Events implements the engine.
func (e *Engine) Events(ctx context.Context, _ events.ListOptions) (<-chan events.Message, <-chan error) {
	messages, errs := make(chan events.Message, 256), make(chan error, 2)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.down != nil {
		errs <- e.down
		return messages, errs
	}
	e.streams[messages] = errs
	context.AfterFunc(ctx, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.streams, messages)
	})
	return messages, errs
}
