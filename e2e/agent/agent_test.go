// Package agent_test runs the node agent on a real Docker engine.
package agent_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/node"
	"github.com/opfield/availability/placement"
)

const (
	agentSocket = "NODE_TEST_SOCKET" // set in the process that is the agent
	within      = 100 * time.Millisecond
)

// printed is one line of the agent's output.
type printed struct {
	At    time.Time
	Event placement.Event
}

// printer is a bus that writes every event to stdout, and has a certificate
// for every name.
type printer struct {
	mu sync.Mutex
}

func (p *printer) PublishPlacement(_ context.Context, e placement.Event) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return json.NewEncoder(os.Stdout).Encode(printed{time.Now(), e})
}

func (p *printer) LastPlacement(context.Context, placement.ID) (placement.Event, bool, error) {
	return placement.Event{}, false, nil
}

func (p *printer) Set([]placement.Event) {}

func (p *printer) Get(string) (*tls.Certificate, error) { return &tls.Certificate{}, nil }

func (p *printer) Ensure(context.Context, string) error { return nil }

// TestAgentProcess is the agent of the tests below: it runs as a process
// inside a host, where the containers are reachable.
func TestAgentProcess(t *testing.T) {
	socket := os.Getenv(agentSocket)
	if socket == "" {
		return // it proves nothing alone
	}
	engine, err := client.NewClientWithOpts(client.WithHost(socket), client.WithAPIVersionNegotiation())
	require.NoError(t, err)
	bus := &printer{}
	agent, err := node.New(node.Config{Node: "node-1", StateFile: os.Getenv("NODE_TEST_STATE"), Engine: engine, Publisher: bus, Links: bus,
		Certificates: bus, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	require.NoError(t, err)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	require.NoError(t, agent.Run(ctx))
}

// world is a node with a real engine and an agent on it.
type world struct {
	*lab.Node
	t     *testing.T
	env   *lab.Env
	agent *lab.Process
}

func newWorld(t *testing.T, engineArgs ...string) *world {
	env := lab.New(t)
	w := &world{t: t, env: env, Node: env.Node("node-1", engineArgs...)}
	w.agent = w.StartEnv("agent", []string{agentSocket + "=" + w.Socket(), "NODE_TEST_STATE=" + w.Path("agent.json")},
		os.Args[0], "-test.run=^TestAgentProcess$", "-test.timeout=10m")
	return w
}

// events returns everything the agent published about a workload.
func (w *world) events(workload string) []printed {
	var found []printed
	for line := range strings.Lines(w.agent.Log()) {
		var p printed
		if strings.HasPrefix(line, `{"At"`) && strings.HasSuffix(line, "\n") {
			require.NoError(w.t, json.Unmarshal([]byte(line), &p))
			if p.Event.Workload == workload {
				found = append(found, p)
			}
		}
	}
	return found
}

// after waits for an event after the moment that matches, and returns how
// long it took.
func (w *world) after(begin time.Time, workload, what string, match func(placement.Event) bool) time.Duration {
	w.t.Helper()
	var took time.Duration
	w.env.Await(15*time.Second, workload+" "+what, func() bool {
		for _, p := range w.events(workload) {
			if p.At.After(begin) && match(p.Event) {
				took = p.At.Sub(begin)
				return true
			}
		}
		return false
	})
	w.t.Logf("%-6s %-34s %8.1f ms", workload, what, float64(took.Microseconds())/1000)
	return took
}

func serves(e placement.Event) bool   { return e.Serves() }
func notReady(e placement.Event) bool { return !e.Ready }

func TestAgent_OnARealEngine(t *testing.T) { // DSC-1, RDY-1, RDY-3
	w := newWorld(t)
	begin := time.Now()
	web := w.RunApp(lab.App{Workload: "web", Ports: "8080,9000=tcp", Args: []string{"--drain", "1s"}})
	w.after(begin, "web", "created, started, ready", serves)
	require.Len(t, w.events("web")[len(w.events("web"))-1].Event.Ports, 2)

	// A container that is up but does not listen yet becomes ready soon after.
	begin = time.Now()
	w.RunApp(lab.App{Workload: "late", Args: []string{"--start-delay", "700ms"}})
	w.after(begin, "late", "waits for its port", func(e placement.Event) bool { return e.State == placement.StateStarting })
	require.Greater(t, w.after(begin, "late", "ready after a delay of 700 ms", serves), 700*time.Millisecond)

	for range 3 {
		begin = time.Now()
		web.Kill("KILL")
		require.Less(t, w.after(begin, "web", "docker kill, not ready", notReady), within)
		begin = time.Now()
		web.Start()
		w.after(begin, "web", "docker start, ready", serves)
	}
	begin = time.Now()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		web.Stop(10)
	}()
	require.Less(t, w.after(begin, "web", "docker stop, draining", func(e placement.Event) bool { return e.Role == placement.RoleDraining && e.Ready }), within)
	<-stopped
	w.after(begin, "web", "docker stop, stopped", func(e placement.Event) bool {
		return e.Role == placement.RoleStopped && e.State == placement.StateStopped
	})
	begin = time.Now()
	web.Start()
	w.after(begin, "web", "docker start, ready", serves)
	begin = time.Now()
	web.Pause()
	require.Less(t, w.after(begin, "web", "docker pause, not ready", notReady), within)
	begin = time.Now()
	web.Unpause()
	require.Less(t, w.after(begin, "web", "docker unpause, ready", serves), within)
	begin = time.Now()
	web.Restart(5)
	w.after(begin, "web", "docker restart, draining", func(e placement.Event) bool { return e.Role == placement.RoleDraining })
	w.after(begin, "web", "docker restart, ready", serves)
	begin = time.Now()
	web.Remove()
	w.after(begin, "web", "docker rm -f, not ready", notReady)
	w.after(begin, "web", "docker rm -f, removed", func(e placement.Event) bool { return e.State == placement.StateRemoved })

	sick := w.RunApp(lab.App{Workload: "sick", Health: true})
	begin = time.Now()
	w.after(begin, "sick", "health check not run yet", func(e placement.Event) bool { return e.State == placement.StateStarting })
	w.after(begin, "sick", "healthy", serves)
	sick.SetHealthy(false)
	w.env.Await(10*time.Second, "Docker says unhealthy", func() bool { return sick.Inspect().State.Health.Status == container.Unhealthy })
	begin = time.Now()
	w.env.Await(within, "unhealthy", func() bool {
		events := w.events("sick")
		return events[len(events)-1].Event.State == placement.StateUnhealthy
	})
	sick.SetHealthy(true)
	w.after(begin, "sick", "healthy again", serves)

	// A second container of the workload keeps the placement ready.
	other := w.RunApp(lab.App{Workload: "late", Name: "late-2"})
	w.env.Await(5*time.Second, "port open", func() bool {
		conn, err := w.DialContext(t.Context(), "tcp", other.Addr(8080).String())
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	seen := len(w.events("late"))
	other.Kill("KILL")
	begin = time.Now()
	sick.Kill("KILL") // a later event shows that the earlier one was worked on
	w.after(begin, "sick", "docker kill, not ready", notReady)
	require.Len(t, w.events("late"), seen, "one container of two is enough")
}

func TestAgent_EngineHangsAndRestarts(t *testing.T) { // RDY-1, RDY-2
	w := newWorld(t, "--live-restore")
	begin := time.Now()
	w.RunApp(lab.App{Workload: "web"})
	checked := w.RunApp(lab.App{Workload: "sick", Health: true})
	w.after(begin, "web", "ready", serves)
	w.after(begin, "sick", "healthy", serves)

	// The engine hangs: nothing changes by it, and what probes see still counts.
	events := len(w.events("web")) + len(w.events("sick"))
	w.Engine.Pause()
	time.Sleep(3 * time.Second)
	require.Len(t, append(w.events("web"), w.events("sick")...), events)
	w.Engine.Continue()

	// The engine goes and comes back; its containers live on.
	w.Engine.Stop(10 * time.Second)
	time.Sleep(time.Second)
	require.Len(t, append(w.events("web"), w.events("sick")...), events)
	w.Engine.Start()
	require.NoError(t, w.AwaitEngine())
	w.env.Await(5*time.Second, "the agent is connected again", func() bool { return w.agent.Logged("engine answers again") })
	time.Sleep(time.Second)
	// The check's result from before does not count and there is no new one:
	// the port decides, and nothing flaps.
	require.Len(t, append(w.events("web"), w.events("sick")...), events)

	// The agent restarts: every event it publishes is that of before.
	w.agent.Stop(5 * time.Second)
	begin = time.Now()
	w.agent.Start()
	w.after(begin, "web", "agent restarted", serves)
	w.after(begin, "sick", "agent restarted", serves)
	for _, p := range append(w.events("web"), w.events("sick")...) {
		require.True(t, p.At.Before(begin) || p.Event.Serves(), "%+v", p)
	}
	begin = time.Now()
	checked.Kill("KILL")
	w.after(begin, "sick", "docker kill, not ready", notReady)
}
