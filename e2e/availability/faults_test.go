package availability

import (
	"context"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/system"
)

// ids returns the container of every serving placement.
func (v view) ids() map[string]string {
	out := map[string]string{}
	for _, p := range v.Placements {
		if p.Want == "serving" {
			out[p.Node] = p.ContainerID
		}
	}
	return out
}

func (s *scene) node(id string) *system.Node {
	for _, n := range s.Nodes {
		if n.ID == id {
			return n
		}
	}
	s.t.Fatalf("no node %s", id)
	return nil
}

// spare returns a node that does not serve the workload.
func (s *scene) spare(v view) *system.Node {
	for _, n := range s.Nodes {
		if v.ids()[n.ID] == "" {
			return n
		}
	}
	s.t.Fatal("every node serves")
	return nil
}

// unmoved fails unless no operation was added and every copy is the same.
func (s *scene) unmoved(before view, ops int) {
	s.t.Helper()
	after := s.view("web")
	require.Equal(s.t, before.ids(), after.ids(), "nothing was replaced")
	require.Len(s.t, s.operations("web"), ops, "no operation was begun")
}

// Faults that pass: nothing is moved for them, and hands that meddle.
func TestFaults(t *testing.T) {
	s := newScene(t, 4)
	s.enable("--mode", "replicated", "--replicas", "3", "--grace", "15s")
	s.settle()
	v := s.view("web")
	ops := len(s.operations("web"))

	t.Run("HostAway11s", func(t *testing.T) { // LOS-1
		run := s.traffic()
		victim := s.node(v.serving()[2])
		dead := s.endpoint(victim.ID)
		cut := time.Now()
		victim.Cut()
		s.Env.Await(10*time.Second, "its link closes", func() bool { return s.LinkState("web."+victim.ID+"/8080") != "open" })
		time.Sleep(11*time.Second - time.Since(cut)) // from the cut, as the grace counts from the last sign of life
		victim.Heal()
		back := s.AwaitLinks(20*time.Second, "open", "web."+victim.ID+"/8080")
		t.Logf("back in routing %v after its return", back.Round(time.Millisecond))
		s.losslessBut(run, dead)
		s.unmoved(v, ops)
	})

	t.Run("NATSCutFromOneNode", func(t *testing.T) { // LOS-1
		run := s.traffic()
		victim := s.node(v.serving()[1])
		s.Env.CutBetween(victim.Host, s.Controller.Host)
		s.Env.Await(15*time.Second, "the node is not reporting", func() bool { return s.nodeState(victim.ID) == "not reporting" })
		time.Sleep(60 * time.Second)
		require.Equal(t, "not reporting", s.nodeState(victim.ID))
		require.Equal(t, "open", s.LinkState("web."+victim.ID+"/8080"))
		s.Env.HealBetween(victim.Host, s.Controller.Host)
		s.Env.Await(30*time.Second, "the node is online", func() bool { return s.nodeState(victim.ID) == "online" })
		s.lossless(run)
		s.unmoved(v, ops)
	})

	t.Run("ControllerCutOff", func(t *testing.T) { // LOS-4
		run := s.traffic()
		s.Controller.Cut()
		time.Sleep(60 * time.Second)
		s.Controller.Heal()
		s.Env.Await(60*time.Second, "every node is online", func() bool {
			for _, n := range s.Nodes {
				if s.nodeState(n.ID) != "online" {
					return false
				}
			}
			return true
		})
		s.lossless(run)
		s.unmoved(v, ops)
	})

	t.Run("RemovedByHand", func(t *testing.T) { // MOD-4
		run := s.traffic()
		victim := s.node(v.serving()[1])
		dead := s.endpoint(victim.ID)
		require.NoError(t, victim.Docker().ContainerRemove(t.Context(), v.ids()[victim.ID], container.RemoveOptions{Force: true}))
		s.await(60*time.Second, "web", "the copy is back", func(now view) bool {
			return now.Serving == 3 && now.ids()[victim.ID] != "" && now.ids()[victim.ID] != v.ids()[victim.ID]
		})
		s.losslessBut(run, dead)
		told := s.view("web")
		for _, p := range told.Placements {
			if p.Node == victim.ID {
				require.Contains(t, p.Outside, "removed")
			}
		}
		s.steady("web")
	})

	t.Run("PrunedStandby", func(t *testing.T) { // LOS-6, IMG-1
		spare := s.spare(s.view("web"))
		ready := func(v view) bool {
			for _, p := range v.Placements {
				if p.Node == spare.ID {
					return p.Want == "prepared" && p.ImageReady
				}
			}
			return false
		}
		s.await(60*time.Second, "web", "the standby has the image", ready)
		s.prune(spare)
		s.await(30*time.Second, "web", "that is noticed and told", func(v view) bool {
			for _, p := range v.Placements {
				if p.Node == spare.ID {
					return strings.Contains(p.Outside, "image") && p.ImageReady
				}
			}
			return false
		})
	})
}

// TestFaults_RestartLoop: a copy that ends again and again without a health
// check is found and replaced (RDY-2, RDY-4, LOS-2).
func TestFaults_RestartLoop(t *testing.T) {
	s := newScene(t, 4)
	s.enable("--mode", "replicated", "--replicas", "3")
	s.settle()
	v := s.view("web")
	victim := s.node(v.serving()[2])
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() { // the application crashes as soon as it runs
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
			}
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			_ = victim.Docker().ContainerKill(ctx, v.ids()[victim.ID], "SEGV")
			cancel()
		}
	}()
	defer func() { close(stop); <-done }()
	start := time.Now()
	s.await(2*time.Minute, "web", "it is healed elsewhere", func(now view) bool {
		return now.Serving == 3 && now.ids()[victim.ID] == "" && now.Operation == nil
	})
	t.Logf("replaced after %v", time.Since(start).Round(time.Second))
	require.Equal(t, "completed", s.last("web", "heal").Status)
	after := s.view("web").ids()
	maps.DeleteFunc(after, func(node, id string) bool { return v.ids()[node] == id })
	require.Len(t, after, 1, "one new copy, the others are untouched")
}

// prune is docker system prune -af.
func (s *scene) prune(n *system.Node) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	_, err := n.Docker().ContainersPrune(ctx, filters.Args{})
	require.NoError(s.t, err)
	// What `prune -a` does, but the test application's own tags: other tests of
	// the engine need those, and an image under another name would be the same.
	all, err := n.Docker().ImageList(ctx, image.ListOptions{All: true})
	require.NoError(s.t, err)
	for _, i := range all {
		_, err := n.Docker().ImageRemove(ctx, i.ID, image.RemoveOptions{Force: true, PruneChildren: true})
		s.t.Logf("removed image %s of %s: %v", i.ID[:19], n.ID, err)
	}
}

// settle waits until nginx lists what it should.
func (s *scene) settle() {
	s.t.Helper()
	s.Env.Await(60*time.Second, "nginx is up to date", func() bool {
		st, err := s.IngressStatus()
		return err == nil && !st.Reload.Pending && st.Reload.Error == ""
	})
}
