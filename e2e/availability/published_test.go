package availability

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/go-connections/nat"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/system"
)

const published = 18080

// publish publishes the application's port on every address of the host.
func publish(c *container.Config, h *container.HostConfig) {
	c.ExposedPorts = nat.PortSet{"8080/tcp": {}}
	h.PortBindings = nat.PortMap{"8080/tcp": {{HostPort: fmt.Sprint(published)}}}
}

// probes are the answers of a node's published port, past nginx.
type probes struct {
	mu   sync.Mutex
	bad  []time.Time
	good int
	stop func() *probes
}

// probe reads the node's published port until it is stopped.
func (s *scene) probe(node string) *probes {
	p := &probes{}
	end := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-end:
				return
			case <-time.After(50 * time.Millisecond):
			}
			at := time.Now()
			ok := s.reads(node)
			p.mu.Lock()
			if ok {
				p.good++
			} else {
				p.bad = append(p.bad, at)
			}
			p.mu.Unlock()
		}
	})
	halt := sync.OnceFunc(func() { close(end); wg.Wait() })
	s.t.Cleanup(halt)
	p.stop = func() *probes { halt(); return p }
	return p
}

// reads asks the node's published port for a page once.
func (s *scene) reads(node string) bool {
	code, body := system.GetHost(s.Client(), s.node(node).HostPort(published), host, "/ok")
	return code == 200 && strings.HasPrefix(body, "ok ")
}

// DIS-2, ELG-3, ROL-1: a container that publishes a host port has its copies
// on other nodes with the same port there. A version and the end of the policy
// lose nothing through nginx, and the survivor's port answers throughout.
func TestPublishedPort_RolloutAndDisable(t *testing.T) {
	s := newScene(t, 3, publish)
	require.True(t, s.reads("node-1"))

	// ELG-3: another container has the port on node-3.
	other := s.Nodes[2].RunApp(lab.App{Name: "other", Configure: publish})
	settings := []string{"--mode", "replicated", "--replicas", "2", "--drain", "3s"}
	all := append([]string{"ha", "check", "web"}, "--mode", "replicated", "--replicas", "3")
	s.Env.Await(soon, "the taken port is named", func() bool {
		out, err := s.CLI(all...)
		return err != nil && strings.Contains(out, "18080/tcp is published by container other")
	})
	other.Remove()

	s.enable(settings...)
	v := s.view("web")
	require.Equal(t, "node-1", v.serving()[0])
	survivor := v.serving()[1]
	for _, node := range v.serving() {
		require.True(t, s.reads(node), "the port is published on %s", node)
	}

	// Each copy frees the port of its node for its successor.
	run, probe := s.traffic(), s.probe(survivor)
	require.Equal(t, "completed", s.rollout(2*time.Minute, "--env", "VERSION=2").Status)
	s.steady("web")
	seen := probe.stop()
	t.Logf("through the rollout the port of %s answered %d times and %d times not", survivor, seen.good, len(seen.bad))
	if n := len(seen.bad); n > 0 {
		t.Logf("it was away for %v", seen.bad[n-1].Sub(seen.bad[0]).Round(time.Millisecond))
	}
	for node, c := range s.inspect("web") {
		if !c.Running {
			continue
		}
		require.Contains(t, s.env(node, c.ID), "VERSION=2")
		require.True(t, s.reads(node), "the port is published on %s", node)
	}
	if v = s.view("web"); v.container(survivor) == "" || v.ids()[survivor] == "" {
		survivor = v.serving()[1]
	}
	require.NotEqual(t, "node-1", survivor)

	// A copy survives: it keeps its port, and is not restarted for its name.
	before := s.inspect("web")[survivor]
	probe = s.probe(survivor)
	said := s.disable(survivor)
	s.answers(10 * time.Second)
	seen = probe.stop()
	s.lossless(run)
	require.Empty(t, seen.bad, "the survivor's port answers throughout")
	require.NotZero(t, seen.good)
	require.Contains(t, said, "its original is stopped on node-1")
	before.Name, before.Restart = "web", "unless-stopped"
	require.Equal(t, before, s.inspect("web")[survivor])
	require.Equal(t, []string{survivor}, s.running("web"))
	require.False(t, s.reads("node-1"))

	// The port is the container's own: Docker publishes it at every start.
	seconds := 1
	require.NoError(t, s.node(survivor).Docker().ContainerRestart(t.Context(), "web", container.StopOptions{Timeout: &seconds}))
	s.Env.Await(10*time.Second, "the port answers", func() bool { return s.reads(survivor) })
	s.answers(10 * time.Second)
}
