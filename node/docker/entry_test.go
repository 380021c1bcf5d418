package docker

import (
	"context"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/network"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/node/docker/dockertest"
)

func inspected(edits ...func(*container.InspectResponse)) container.InspectResponse {
	f := container.InspectResponse{
		ContainerJSONBase: &container.ContainerJSONBase{
			ID: "c", Name: "/c", HostConfig: &container.HostConfig{NetworkMode: "bridge"},
			State: &container.State{Status: container.StateRunning, StartedAt: "2026-01-01T10:00:00Z"},
		},
		Config:          &container.Config{},
		NetworkSettings: &container.NetworkSettings{Networks: map[string]*network.EndpointSettings{"bridge": {IPAddress: "10.0.0.2"}}},
	}
	for _, edit := range edits {
		edit(&f)
	}
	return f
}

func checked(status string, at string) func(*container.InspectResponse) {
	return func(f *container.InspectResponse) {
		f.Config.Healthcheck = &container.HealthConfig{Test: []string{"CMD", "x"}}
		start, err := time.Parse(time.RFC3339, at)
		if err != nil {
			panic(err)
		}
		f.State.Health = &container.Health{Status: status, Log: []*container.HealthcheckResult{{Start: start}}}
	}
}

func TestHealth_OldResultsDoNotCount(t *testing.T) { // RDY-1
	started := time.Date(2026, 1, 1, 10, 0, 0, 0, time.UTC)
	lost := started.Add(time.Hour)
	tests := []struct {
		name  string
		found container.InspectResponse
		lost  time.Time
		want  discovery.Health
	}{
		{"no check", inspected(), time.Time{}, discovery.NoCheck},
		{"check taken away", inspected(func(f *container.InspectResponse) {
			f.Config.Healthcheck = &container.HealthConfig{Test: []string{"NONE"}}
		}), time.Time{}, discovery.NoCheck},
		{"no result", inspected(func(f *container.InspectResponse) {
			f.Config.Healthcheck = &container.HealthConfig{Test: []string{"CMD", "x"}}
		}), time.Time{}, discovery.Checking},
		{"healthy", inspected(checked("healthy", "2026-01-01T10:30:00Z")), time.Time{}, discovery.Healthy},
		{"unhealthy", inspected(checked("unhealthy", "2026-01-01T10:30:00Z")), time.Time{}, discovery.Unhealthy},
		{"starting", inspected(checked("starting", "2026-01-01T10:30:00Z")), time.Time{}, discovery.Checking},
		{"healthy before the start", inspected(checked("healthy", "2026-01-01T09:59:00Z")), time.Time{}, discovery.Checking},
		{"healthy before the engine went: the port decides", inspected(checked("healthy", "2026-01-01T10:30:00Z")), lost, discovery.NoCheck},
		{"unhealthy before the engine went", inspected(checked("unhealthy", "2026-01-01T10:30:00Z")), lost, discovery.Unhealthy},
		{"healthy after the engine came back", inspected(checked("healthy", "2026-01-01T11:00:01Z")), lost, discovery.Healthy},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			require.Equal(t, test.want, health(test.found, started, test.lost, discovery.Checking))
		})
	}
}

// An engine that was restarted says "starting" of what it checked before: the
// port decides for what was healthy, until there is a result. Another start
// begins anew.
func TestEntry_EngineBeginsAnew(t *testing.T) { // RDY-1, RDY-2
	started, now := "2026-01-01T10:00:00Z", time.Now()
	said := func(status, since string) inspection {
		return inspection{found: inspected(checked(status, "2026-01-01T12:00:00Z"), func(f *container.InspectResponse) {
			f.State.StartedAt = since
			if status == container.Starting {
				f.State.Health.Log = nil // Docker does not keep it
			}
		})}
	}
	tests := []struct {
		name  string
		said  []inspection
		want  discovery.Health
		event events.Action // before the last answer
	}{
		{name: "never healthy", said: []inspection{said("starting", started), said("starting", started)}, want: discovery.Checking},
		{name: "was healthy", said: []inspection{said("healthy", started), said("starting", started)}, want: discovery.NoCheck},
		{name: "asked twice", said: []inspection{said("healthy", started), said("starting", started), said("starting", started)}, want: discovery.NoCheck},
		{name: "was unhealthy", said: []inspection{said("unhealthy", started), said("starting", started)}, want: discovery.Checking},
		{name: "healthy again", said: []inspection{said("healthy", started), said("starting", started), said("healthy", started)}, want: discovery.Healthy},
		{name: "unhealthy afterwards", said: []inspection{said("healthy", started), said("starting", started), said("unhealthy", started)}, want: discovery.Unhealthy},
		{name: "another start, event missed", said: []inspection{said("healthy", started), said("starting", "2026-01-01T11:00:00Z")}, want: discovery.Checking},
		{name: "another start", said: []inspection{said("healthy", started), said("starting", "2026-01-01T11:00:00Z")}, event: events.ActionStart, want: discovery.Checking},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			e := newEntry(container.Summary{ID: "c", State: "running"})
			for i, one := range test.said {
				if i == len(test.said)-1 && test.event != "" {
					e.apply(events.Message{Action: test.event}, now)
				}
				e.learn(one, time.Time{}, now)
			}
			require.Equal(t, test.want, e.c.Health)
		})
	}
}

func TestParseSignal(t *testing.T) {
	for text, want := range map[string]syscall.Signal{
		"15": syscall.SIGTERM, "9": syscall.SIGKILL, "TERM": syscall.SIGTERM, "sigquit": syscall.SIGQUIT, "SIGUSR1": syscall.SIGUSR1,
		"": 0, "NOPE": 0,
	} {
		require.Equal(t, want, ParseSignal(text), text)
	}
}

func TestEntry_StopSignal(t *testing.T) {
	now := time.Now()
	kill := func(e *entry, signal string) {
		e.apply(events.Message{Action: events.ActionKill, Actor: events.Actor{Attributes: map[string]string{"signal": signal}}}, now)
	}
	e := newEntry(container.Summary{ID: "c", State: "running"})
	require.True(t, e.learn(inspection{found: inspected(func(f *container.InspectResponse) { f.Config.StopSignal = "SIGQUIT" })}, time.Time{}, now))
	kill(e, "1")
	require.False(t, e.c.Stopping, "SIGHUP asks for no end")
	kill(e, "3")
	require.True(t, e.c.Stopping, "its own stop signal does")

	// It ignores the signal: after a long time it is taken back.
	e.learn(inspection{found: inspected()}, time.Time{}, now.Add(forgetStopAfter-time.Second))
	require.True(t, e.c.Stopping)
	e.learn(inspection{found: inspected()}, time.Time{}, now.Add(forgetStopAfter+time.Second))
	require.False(t, e.c.Stopping)

	// A start whose event was missed ends the stopping too.
	kill(e, "15")
	require.True(t, e.c.Stopping)
	e.learn(inspection{found: inspected(func(f *container.InspectResponse) { f.State.StartedAt = "2026-01-01T11:00:00Z" })}, time.Time{}, now)
	require.False(t, e.c.Stopping)
}

func TestEntry_KilledStaysSuspectUntilItIsDead(t *testing.T) { // RDY-3
	now := time.Now()
	e := newEntry(container.Summary{ID: "c", State: "running"})
	e.learn(inspection{found: inspected()}, time.Time{}, now)
	require.Empty(t, e.c.Suspect)
	hold := e.apply(events.Message{Action: events.ActionKill, Actor: events.Actor{Attributes: map[string]string{"signal": "9"}}}, now)
	require.Equal(t, killedHold, hold)
	e.learn(inspection{found: inspected()}, time.Time{}, now.Add(time.Second))
	require.NotEmpty(t, e.c.Suspect, "the engine still calls it running")
	e.learn(inspection{found: inspected()}, time.Time{}, now.Add(hold))
	require.Empty(t, e.c.Suspect, "it lives after all")
}

func TestAddress(t *testing.T) {
	mode := func(m container.NetworkMode) func(*container.InspectResponse) {
		return func(f *container.InspectResponse) { f.HostConfig.NetworkMode = m }
	}
	networks := func(all map[string]*network.EndpointSettings) func(*container.InspectResponse) {
		return func(f *container.InspectResponse) { f.NetworkSettings.Networks = all }
	}
	engine := dockertest.New()
	engine.Run("other", nil)
	tests := []struct {
		name  string
		found container.InspectResponse
		want  string
	}{
		{"bridge", inspected(), "10.0.0.2"},
		{"host", inspected(mode("host"), networks(nil)), "127.0.0.1"},
		{"another container's network", inspected(mode("container:other"), networks(nil)), "127.0.0.1"},
		{"a container's that is gone", inspected(mode("container:gone"), networks(nil)), "invalid IP"},
		{"none", inspected(mode("none"), networks(map[string]*network.EndpointSettings{"none": {}})), "invalid IP"},
		{"several: the first by name", inspected(networks(map[string]*network.EndpointSettings{
			"b": {IPAddress: "10.0.2.2"}, "a": {IPAddress: "10.0.1.2"}})), "10.0.1.2"},
		{"IPv6 only", inspected(networks(map[string]*network.EndpointSettings{"a": {GlobalIPv6Address: "fd00::2"}, "b": nil})), "fd00::2"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			want, _ := netip.ParseAddr(test.want)
			require.Equal(t, want, Address(context.Background(), engine, test.found))
		})
	}
}
