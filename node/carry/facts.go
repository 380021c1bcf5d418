package carry

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/system"

	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/placement"
)

// facts keeps what the node tells about itself. It has a goroutine of its own:
// a container that hangs delays its own numbers only.
type facts struct {
	carrier *Carrier
	wake    chan struct{} // capacity 1

	mu     sync.Mutex
	known  bool
	now    placement.NodeFacts
	strays []placement.Observed // owned without anything desired
	uses   map[string]use       // by container id
}

// use is what a running container has of the node: its limits, or what it
// uses where it has none.
type use struct {
	cpu, memory               int64 // thousandths of a core, bytes
	limitedCPU, limitedMemory bool
	at                        time.Time
}

func newFacts(c *Carrier) *facts {
	return &facts{carrier: c, wake: make(chan struct{}, 1), uses: map[string]use{}}
}

func (f *facts) soon() { poke(f.wake) }

// forget lets a container be looked at again: its limits may have changed.
func (f *facts) forget(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.uses, id)
}

func (f *facts) get() (placement.NodeFacts, []placement.Observed, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.now, slices.Clone(f.strays), f.known
}

func (f *facts) run(ctx context.Context) error {
	again := retryFirst
	for {
		wait := checkEvery
		if f.look(ctx) {
			again = retryFirst
		} else {
			wait, again = again, min(2*again, retryMost)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		case <-f.wake:
			select { // one look for many events
			case <-ctx.Done():
			case <-time.After(factsAfter):
			}
		}
	}
}

// look asks the engine and reports whether it answered. Without an answer the
// last facts stay, with the error.
func (f *facts) look(ctx context.Context) bool {
	engine := f.carrier.config.Engine
	about, err := within(ctx, listLimit, "ask Docker about the node", func(ctx context.Context) (system.Info, error) { return engine.Info(ctx) })
	var list []container.Summary
	if err == nil {
		list, err = within(ctx, listLimit, "list containers", func(ctx context.Context) ([]container.Summary, error) {
			return engine.ContainerList(ctx, container.ListOptions{All: true})
		})
	}
	if ctx.Err() != nil {
		return false
	}
	if err != nil {
		f.mu.Lock()
		f.known, f.now.Error, f.now.Docker = true, clip(err.Error()), ""
		f.mu.Unlock()
		return false
	}
	next := placement.NodeFacts{
		Arch: arch(about.Architecture), OS: about.OSType, Docker: about.ServerVersion,
		CPU: int64(about.NCPU) * 1000, Memory: about.MemTotal, Containers: []placement.TakenName{},
	}
	ids := map[string]bool{}
	for _, s := range list {
		ids[s.ID] = true
		taken := placement.TakenName{Running: s.State == container.StateRunning || s.State == container.StatePaused, Workload: f.carrier.owner(s.ID)}
		if s.Labels[discovery.LabelPlacement] != "" && taken.Workload == "" {
			taken.Workload = s.Labels[discovery.LabelWorkload]
		}
		if len(s.Names) > 0 {
			taken.Name = strings.TrimPrefix(s.Names[0], "/")
		}
		for _, p := range s.Ports {
			if p.PublicPort != 0 {
				taken.Published = append(taken.Published, placement.PublishedPort{Address: address(p.IP), Port: p.PublicPort, Container: p.PrivatePort, Transport: p.Type})
			}
		}
		slices.SortFunc(taken.Published, func(a, b placement.PublishedPort) int {
			return compare(strconv.Itoa(int(a.Port))+a.Transport+a.Address, strconv.Itoa(int(b.Port))+b.Transport+b.Address)
		})
		next.Containers = append(next.Containers, taken)
		if taken.Running {
			u := f.use(ctx, s.ID)
			next.ReservedCPU += u.cpu
			next.ReservedMemory += u.memory
		}
	}
	slices.SortFunc(next.Containers, func(a, b placement.TakenName) int { return compare(a.Name, b.Name) })
	strays := f.carrier.strays(list)
	f.carrier.tidy(ids)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.known, f.now, f.strays = true, next, strays
	maps.DeleteFunc(f.uses, func(id string, _ use) bool { return !ids[id] })
	return true
}

func address(ip string) string {
	if ip == "0.0.0.0" || ip == "::" {
		return ""
	}
	return ip
}

// use returns the limits of a container, and measures now and then what one
// without limits uses. What is not answered counts as it was.
func (f *facts) use(ctx context.Context, id string) use {
	f.mu.Lock()
	u, known := f.uses[id]
	f.mu.Unlock()
	if known && (u.limitedCPU && u.limitedMemory || time.Since(u.at) < statsEvery) {
		return u
	}
	engine := f.carrier.config.Engine
	found, err := within(ctx, inspectLimit, "inspect container", func(ctx context.Context) (container.InspectResponse, error) {
		return engine.ContainerInspect(ctx, id)
	})
	next := use{at: time.Now()}
	if err == nil && found.HostConfig != nil {
		next = measure(ctx, engine, found)
	} else if known {
		next.cpu, next.memory = u.cpu, u.memory
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.uses[id] = next
	return next
}

// measure returns the limits of a container, and what it uses where it has
// none: its CPU time on average since its start.
func measure(ctx context.Context, engine Engine, found container.InspectResponse) use {
	u := use{at: time.Now()}
	r := found.HostConfig.Resources
	switch {
	case r.NanoCPUs > 0:
		u.cpu, u.limitedCPU = r.NanoCPUs/1e6, true
	case r.CPUQuota > 0:
		period := r.CPUPeriod
		if period == 0 {
			period = 100_000
		}
		u.cpu, u.limitedCPU = r.CPUQuota*1000/period, true
	}
	if r.Memory > 0 {
		u.memory, u.limitedMemory = r.Memory, true
	}
	if u.limitedCPU && u.limitedMemory || found.State == nil || !found.State.Running {
		return u
	}
	stats, err := within(ctx, inspectLimit, "measure container", func(ctx context.Context) (container.StatsResponse, error) {
		var s container.StatsResponse
		answer, err := engine.ContainerStatsOneShot(ctx, found.ID)
		if err != nil {
			return s, err
		}
		defer answer.Body.Close()
		return s, json.NewDecoder(answer.Body).Decode(&s)
	})
	if err != nil {
		return u
	}
	if !u.limitedMemory {
		cache := stats.MemoryStats.Stats["inactive_file"]
		if cache == 0 {
			cache = stats.MemoryStats.Stats["total_inactive_file"]
		}
		u.memory = int64(stats.MemoryStats.Usage - min(cache, stats.MemoryStats.Usage))
	}
	if started, err := time.Parse(time.RFC3339Nano, found.State.StartedAt); err == nil && !u.limitedCPU {
		if ran := time.Since(started); ran > 0 {
			u.cpu = int64(float64(stats.CPUStats.CPUUsage.TotalUsage) / float64(ran) * 1000)
		}
	}
	return u
}

// arch is Go's name of an architecture.
func arch(name string) string {
	switch name {
	case "x86_64", "x86-64":
		return "amd64"
	case "aarch64", "armv8l":
		return "arm64"
	case "armv7l", "armv6l", "armhf":
		return "arm"
	case "i386", "i686":
		return "386"
	}
	return name
}

// strays are the placements that are ours by their labels, with nothing
// desired of them.
func (c *Carrier) strays(list []container.Summary) []placement.Observed {
	pages := c.book.all()
	var out []placement.Observed
	for _, s := range list {
		workload := s.Labels[discovery.LabelWorkload]
		generation, err := strconv.ParseUint(s.Labels[discovery.LabelGeneration], 10, 64)
		if m := pages[workload]; m.Desired != nil || m.released(s.ID) {
			continue
		}
		if id := (placement.ID{Workload: workload, Node: c.config.Node}); err != nil || id.Check() != nil || s.Labels[discovery.LabelPlacement] != id.String() {
			continue
		}
		o := placement.Observed{Workload: workload, Node: c.config.Node, Generation: generation, Container: s.ID, Role: placement.RoleStopped, State: placement.StateStopped}
		if s.State == container.StateRunning {
			o.Role, o.State = placement.RoleServing, placement.StateRunning
		}
		out = append(out, o)
	}
	return out
}

// tidy forgets what was given back or left alone and does not exist any more.
func (c *Carrier) tidy(ids map[string]bool) {
	stale := func(m memory) bool {
		return m.Desired == nil && m.Left.IsZero() && !ids[m.Current] && !ids[m.Adopted] && !slices.ContainsFunc(m.Released, func(id string) bool { return ids[id] })
	}
	found := false
	for _, m := range c.book.all() {
		found = found || stale(m)
	}
	if !found {
		return
	}
	if err := c.book.edit(func(pages map[string]memory) {
		for workload, m := range pages {
			if stale(m) {
				m.leave(pages, workload)
			}
		}
	}); err != nil {
		c.config.Logger.Warn("records of removed containers not forgotten", "err", err)
		return
	}
	c.config.Changed()
}
