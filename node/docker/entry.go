package docker

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"golang.org/x/sys/unix"

	"github.com/opfield/availability/node/discovery"
)

// entry is one labelled container.
type entry struct {
	c          discovery.Container
	bare       bool // known from an event only: not inspected yet
	startedAt  time.Time
	stopSignal syscall.Signal
	stopSince  time.Time // when it was asked to end
	hold       time.Time // until then an answer does not lift a suspicion
	touched    time.Time // last event, or creation

	version    uint64 // grows with every event: an older answer is refused
	inspecting bool
	again      bool // inspect once more when the present call is back
}

type inspection struct {
	id      string
	version uint64
	found   container.InspectResponse
	addr    netip.Addr
	err     error
}

func newEntry(s container.Summary) *entry {
	e := &entry{touched: time.Now(), stopSignal: syscall.SIGTERM}
	e.c = discovery.Container{ID: s.ID, Labels: s.Labels, Status: status(s.State), Suspect: "the engine did not answer about it yet"}
	if len(s.Names) > 0 {
		e.c.Name = strings.TrimPrefix(s.Names[0], "/")
	}
	return e
}

// apply takes an event at its word, at once. It returns after which time the
// container must be looked at again, or zero.
func (e *entry) apply(m events.Message, now time.Time) time.Duration {
	e.version++
	e.touched = now
	switch m.Action {
	case events.ActionStart:
		e.c.Status, e.c.Stopping, e.c.Suspect = discovery.Running, false, ""
		e.hold = time.Time{}
		e.c.Addr = netip.Addr{} // it may get another one
		if e.c.Health != discovery.NoCheck {
			e.c.Health = discovery.Checking
		}
	case events.ActionKill:
		switch sig := ParseSignal(m.Actor.Attributes["signal"]); sig {
		case syscall.SIGKILL:
			// Until it is dead the engine still calls it running.
			e.c.Suspect, e.hold = "it was killed", now.Add(killedHold)
			return killedHold
		case syscall.SIGTERM, e.stopSignal:
			e.c.Stopping, e.stopSince = true, now
		}
	case events.ActionOOM:
		e.c.Suspect, e.hold = "it ran out of memory", now.Add(oomHold)
		return oomHold
	case events.ActionDie:
		e.c.Status = discovery.Stopped
	case events.ActionStop:
		e.c.Status, e.c.Stopping = discovery.Stopped, true
	case events.ActionPause:
		e.c.Status = discovery.Paused
	case events.ActionUnPause:
		e.c.Status = discovery.Running
	case events.ActionHealthStatusHealthy:
		e.c.Health = discovery.Healthy
	case events.ActionHealthStatusUnhealthy:
		e.c.Health = discovery.Unhealthy
	}
	return 0
}

// learn takes the engine's answer and reports whether it says anything new.
// lost is when the engine went away last: what its health check found before
// does not count.
func (e *entry) learn(i inspection, lost, now time.Time) bool {
	before, started := e.c, e.startedAt
	f := i.found
	if f.ContainerJSONBase == nil || f.State == nil || f.Config == nil {
		return false
	}
	e.bare = false
	e.c.Name = strings.TrimPrefix(f.Name, "/")
	e.c.Labels = f.Config.Labels
	e.c.Addr = i.addr
	e.c.Status = status(f.State.Status)
	e.startedAt, _ = time.Parse(time.RFC3339Nano, f.State.StartedAt)
	if !started.IsZero() && e.startedAt.After(started) {
		e.c.Stopping = false // another start, whose event was missed
	}
	if e.c.Stopping && e.c.Status == discovery.Running && now.Sub(e.stopSince) > forgetStopAfter {
		e.c.Stopping = false
	}
	if e.stopSignal = ParseSignal(f.Config.StopSignal); e.stopSignal == 0 {
		e.stopSignal = syscall.SIGTERM
	}
	run := discovery.Checking // what was known of this run
	if started.Equal(e.startedAt) {
		run = before.Health
	}
	e.c.Health = health(f, e.startedAt, lost, run)
	if !now.Before(e.hold) {
		e.c.Suspect = ""
	}
	return !same(before, e.c) || !started.Equal(e.startedAt)
}

// agrees reports whether a list says the same as is known, so that a question
// about the container can be saved.
func (e *entry) agrees(s container.Summary) bool {
	if e.bare || e.c.Suspect != "" || e.c.Stopping || e.c.Status != status(s.State) {
		return false
	}
	if len(s.Names) == 0 || e.c.Name != strings.TrimPrefix(s.Names[0], "/") {
		return false
	}
	want := discovery.NoCheck
	switch listedHealth(s.Status) {
	case container.Healthy:
		want = discovery.Healthy
	case container.Unhealthy:
		want = discovery.Unhealthy
	case container.Starting:
		want = discovery.Checking
	}
	if e.c.Status == discovery.Running && want != e.c.Health {
		return false
	}
	if s.NetworkSettings == nil || e.c.Status != discovery.Running {
		return true
	}
	for _, network := range s.NetworkSettings.Networks {
		if network != nil && network.IPAddress == e.c.Addr.String() {
			return true
		}
	}
	return len(s.NetworkSettings.Networks) == 0
}

func same(a, b discovery.Container) bool {
	return a.Name == b.Name && a.Status == b.Status && a.Health == b.Health && a.Addr == b.Addr &&
		a.Stopping == b.Stopping && a.Suspect == b.Suspect && maps.Equal(a.Labels, b.Labels)
}

func status(state string) discovery.Status {
	switch state {
	case container.StateRunning:
		return discovery.Running
	case container.StatePaused:
		return discovery.Paused
	case container.StateRestarting:
		return discovery.Restarting
	case container.StateCreated, container.StateExited, container.StateDead, container.StateRemoving:
		return discovery.Stopped
	}
	return discovery.Unknown
}

// health reads the result of the health check. One from before the present
// start does not count. A good one from before the engine went away does not
// count either: then the port decides until there is a new one. The engine of
// 20.10 with live-restore may never check again; a later one begins anew with
// "starting", which nothing but its own restart brings back in a run that was
// healthy before, and may not check for half a minute.
func health(f container.InspectResponse, startedAt, lost time.Time, before discovery.Health) discovery.Health {
	check := f.Config.Healthcheck
	if check == nil || len(check.Test) == 0 || check.Test[0] == "NONE" {
		return discovery.NoCheck
	}
	h := f.State.Health
	if h == nil {
		return discovery.Checking
	}
	if n := len(h.Log); n > 0 && h.Log[n-1] != nil && h.Log[n-1].Start.Before(startedAt) {
		return discovery.Checking
	} else if n > 0 && h.Log[n-1] != nil && h.Log[n-1].Start.Before(lost) && h.Status == container.Healthy {
		return discovery.NoCheck
	}
	switch {
	case h.Status == container.Healthy:
		return discovery.Healthy
	case h.Status == container.Unhealthy:
		return discovery.Unhealthy
	case before == discovery.Healthy || before == discovery.NoCheck:
		return discovery.NoCheck
	}
	return discovery.Checking
}

// Address is where the container's ports are reached from the node itself.
func Address(ctx context.Context, engine Inspector, f container.InspectResponse) netip.Addr {
	if f.ContainerJSONBase != nil && f.HostConfig != nil {
		switch mode := f.HostConfig.NetworkMode; {
		case mode.IsHost():
			return netip.AddrFrom4([4]byte{127, 0, 0, 1})
		case mode.IsContainer():
			other, err := engine.ContainerInspect(ctx, mode.ConnectedContainer())
			if err != nil || other.HostConfig == nil || other.HostConfig.NetworkMode.IsContainer() {
				return netip.Addr{} // it shows as "no network address", and the next look tries again
			}
			return Address(ctx, engine, other)
		}
	}
	if f.NetworkSettings == nil {
		return netip.Addr{}
	}
	names := slices.Sorted(maps.Keys(f.NetworkSettings.Networks))
	for _, pick := range []func(name string) string{
		func(name string) string { return f.NetworkSettings.Networks[name].IPAddress },
		func(name string) string { return f.NetworkSettings.Networks[name].GlobalIPv6Address },
	} {
		for _, name := range names {
			if f.NetworkSettings.Networks[name] == nil {
				continue
			}
			if addr, err := netip.ParseAddr(pick(name)); err == nil {
				return addr
			}
		}
	}
	return netip.Addr{}
}

// ParseSignal reads "15", "TERM" or "SIGTERM"; zero if it is none of them.
func ParseSignal(text string) syscall.Signal {
	text = strings.ToUpper(strings.TrimSpace(text))
	if n, err := strconv.Atoi(text); err == nil {
		return syscall.Signal(n)
	}
	if !strings.HasPrefix(text, "SIG") {
		text = fmt.Sprintf("SIG%s", text)
	}
	return unix.SignalNum(text)
}
