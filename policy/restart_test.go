package policy_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/opfield/availability/policy"
)

// outcome is what a scenario led to, without its times.
type outcome struct {
	Contents, Running, Members, History string
	Created, Restarts                   int
	Steps                               []string
}

func lines(t testing.TB, s *script, text string) {
	for _, line := range strings.Split(strings.TrimSpace(text), "\n") {
		if err := s.command(strings.Fields(line), nil); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
	}
}

func (s *script) outcome() outcome {
	out := outcome{
		Contents: s.look([]string{"contents"}), Running: s.look([]string{"running"}), Members: s.look([]string{"members"}),
		History: s.look([]string{"history", "a,b,c"}), Created: s.w.created, Restarts: s.w.restarts,
	}
	for _, op := range s.w.doc.History[:min(3, len(s.w.doc.History))] {
		for _, step := range op.Steps {
			out.Steps = append(out.Steps, string(op.Type)+": "+step.Name)
		}
	}
	slices.Sort(out.Steps)
	return out
}

// OPS-3, ROL-4, PRI-3: a controller that is killed at any moment, before or
// after it stored a decision, loses no step and does none twice.
func TestDecide_ControllerKilledAnywhere(t *testing.T) {
	for name, scenario := range map[string][2]string{
		"enable":            {"nodes 4", "enable node-1 mode=replicated replicas=3"},
		"rollout":           {"nodes 4\nenable node-1 mode=replicated replicas=3\nuntil idle 1m", "rollout image=web:2"},
		"rollout in place":  {"nodes 3\nenable node-1 mode=replicated replicas=3 surge=0 unavailable=1\nuntil idle 1m", "rollout image=web:2"},
		"rollout failover":  {"nodes 3\nenable node-1 mode=failover\nuntil idle 1m", "rollout env=2"},
		"rollback":          {"nodes 4\nenable node-1 mode=replicated replicas=2\nuntil idle 1m", "rollout env=2 broken"},
		"rollback in place": {"nodes 3\nenable node-1 mode=replicated replicas=3 surge=0 unavailable=1\nuntil idle 1m", "rollout env=2 broken"},
		"heal":              {"nodes 4\nenable node-1 mode=replicated replicas=2\nuntil idle 1m", "node-2 offline\nwait 20s"},
		"failback":          {"nodes 3\nenable node-1 mode=failover priority=node-1,node-2,node-3 delay=0\nuntil idle 1m\nnode-1 offline\nwait 40s", "node-1 online\nwait 2s"},
		"stop":              {"nodes 3\nenable node-1 mode=replicated replicas=2\nuntil idle 1m\nnode-1 streams=1", "stop"},
		"start":             {"nodes 3\nenable node-1 mode=replicated replicas=2\nuntil idle 1m\nstop\nuntil idle 1m", "start"},
		"restart":           {"nodes 3\nenable node-1 mode=replicated replicas=2\nuntil idle 1m", "restart"},
		"scale down":        {"nodes 4\nenable node-1 mode=replicated replicas=4\nuntil idle 1m", "settings replicas=2"},
		"disable":           {"nodes 3\nenable node-1 mode=replicated replicas=2\nuntil idle 1m", "disable node-1"},
		"disable, other":    {"nodes 3\nenable node-1 mode=replicated replicas=2\nuntil idle 1m", "disable node-2"},
	} {
		t.Run(name, func(t *testing.T) {
			run := func(kill func(*scripted) func() bool, after bool) (outcome, int) {
				s := &script{t: t}
				lines(t, s, scenario[0])
				s.w.mark()
				stores := 0
				killed := kill(s.w)
				hook := func() bool { stores++; return killed() }
				if after {
					s.w.afterStore = func() {
						if hook() {
							s.w.afterStore = nil
							s.w.restartController()
						}
					}
				} else {
					s.w.beforeStore = func() bool {
						if !hook() {
							return false
						}
						s.w.beforeStore = nil
						return true
					}
				}
				lines(t, s, scenario[1]+"\nuntil idle 40m\nwait 10s")
				return s.outcome(), stores
			}
			want, stores := run(func(*scripted) func() bool { return func() bool { return false } }, true)
			require.Greater(t, stores, 2)
			for k := range stores {
				for _, after := range []bool{true, false} {
					n := 0
					got, _ := run(func(*scripted) func() bool { return func() bool { n++; return n == k+1 } }, after)
					require.Equal(t, want, got, "killed at document %d of %d, after it was stored: %t", k+1, stores, after)
				}
			}
		})
	}
}

// Decide is a function: the same input gives the same plan, what it is given
// stays as it is, and soon there is nothing left to decide about the same world.
func TestDecide_Pure(t *testing.T) {
	settings := []string{"surge=0", "surge=2", "unavailable=1", "unavailable=0", "drain=0", "drain=60", "grace=0", "delay=0", "priority=node-2,node-3,node-1", "nodes=node-1,node-2,node-3,node-4", "nodes=all"}
	faults := []string{"offline", "online", "silent", "reports", "hangs", "answers", "drain", "undrain", "sick", "well", "loses", "crashes", "streams=2", "streams=0", "memory=10", "memory=8192"}
	rapid.Check(t, func(r *rapid.T) {
		s := &script{t: t}
		s.w = newScripted(t, 5)
		mode := rapid.SampledFrom([]string{"mode=failover", "mode=replicated replicas=2", "mode=replicated replicas=3"}).Draw(r, "mode")
		lines(t, s, "enable node-1 "+mode)
		act := func(line string) {
			if err := s.command(strings.Fields(line), nil); err != nil {
				r.Fatalf("%s: %v", line, err)
			}
		}
		r.Repeat(map[string]func(*rapid.T){
			"wait": func(r *rapid.T) { s.w.advance(time.Duration(rapid.IntRange(1, 90).Draw(r, "seconds")) * time.Second) },
			"node": func(r *rapid.T) {
				act(fmt.Sprintf("node-%d %s", rapid.IntRange(1, 5).Draw(r, "node"), rapid.SampledFrom(faults).Draw(r, "fault")))
			},
			"settings": func(r *rapid.T) { act("settings " + rapid.SampledFrom(settings).Draw(r, "setting")) },
			"rollout": func(r *rapid.T) {
				act(rapid.SampledFrom([]string{"rollout env=1", "rollout env=2 broken", "rollout image=web:2"}).Draw(r, "version"))
			},
			"do": func(r *rapid.T) {
				act(rapid.SampledFrom([]string{"stop", "start", "restart", "retry"}).Draw(r, "what"))
			},
			"disable": func(r *rapid.T) { act(fmt.Sprintf("disable node-%d", rapid.IntRange(1, 5).Draw(r, "node"))) },
			"": func(r *rapid.T) {
				if !s.w.exists { // it is enabled again as soon as the nodes let it
					_ = s.w.enable("node-1", strings.Fields(mode))
					return
				}
				world := s.w.world()
				doc := s.w.doc
				plan := policy.Decide(s.w.now, doc, world)
				if again := policy.Decide(s.w.now, doc, world); encode(plan) != encode(again) {
					r.Fatalf("the same input gives two plans:\n%s\n%s", encode(plan), encode(again))
				}
				for range 8 {
					if plan.Over || !plan.Changed {
						return
					}
					plan = policy.Decide(s.w.now, plan.Document, world)
				}
				r.Fatalf("it does not come to rest: %s", encode(plan.Events))
			},
		})
	})
}

// OPS-2, OPS-4: a hundred policies heal at once: four at a time, in the order
// in which they were asked for, a little apart, and each exactly once.
func TestDecide_HundredHeal(t *testing.T) {
	const policies = 100
	var all []*script
	for i := range policies {
		s := &script{t: t, w: newScripted(t, 4)}
		s.w.workload = fmt.Sprintf("web%03d", i)
		lines(t, s, "enable node-1 mode=replicated replicas=2\nuntil idle 1m\nwait 20s\nnode-2 offline")
		s.w.slot = false
		all = append(all, s)
	}
	most, jitter := 0, map[string]bool{}
	var order []policy.Claimant
	started := map[string]bool{}
	for range 20 * 60 {
		running, queue := 0, []policy.Claimant{}
		for _, s := range all {
			claim, has, wants := s.w.doc.Claim(s.w.now)
			switch {
			case has:
				running++
			case wants:
				queue = append(queue, claim)
			}
		}
		if most = max(most, running); len(order) == policies && running == 0 {
			break
		}
		granted := policy.Grant(queue, running, policy.MaxLimited)
		for _, c := range queue {
			if slices.Contains(granted, c.Workload) && !started[c.Workload] {
				started[c.Workload] = true
				order = append(order, c)
			}
		}
		for _, s := range all {
			if s.w.slot = slices.Contains(granted, s.w.workload); s.w.slot {
				s.w.decide()
			}
			s.w.slot = false
			s.w.advance(tick)
		}
	}
	require.Equal(t, policy.MaxLimited, most)
	require.Len(t, order, policies)
	require.True(t, slices.IsSortedFunc(order, func(a, b policy.Claimant) int { return a.Since.Compare(b.Since) }))
	for _, s := range all {
		require.Equal(t, "heal:completed,enable:completed", s.look([]string{"history", "a,b,c"}), s.w.workload)
		require.Equal(t, "node-1,node-3", s.look([]string{"serving"}))
		require.Equal(t, 2, s.w.created, "one by the enable, one by the heal")
		jitter[s.w.doc.History[0].StartedAt.Sub(s.w.doc.History[0].CreatedAt).String()] = true
	}
	require.Greater(t, len(jitter), 10, "they do not begin at the same moment")
}

// OPS-2: a free slot goes to a heal first, then in the order of asking.
func TestGrant(t *testing.T) {
	at := func(n int) time.Time { return time.Date(2026, 1, 1, 0, 0, n, 0, time.UTC) }
	queue := []policy.Claimant{
		{Workload: "scale-early", Type: policy.Scale, Since: at(1)}, {Workload: "heal-late", Type: policy.Heal, Since: at(9)},
		{Workload: "rollout", Type: policy.Rollout, Since: at(2)}, {Workload: "heal-early", Type: policy.Heal, Since: at(5)},
		{Workload: "a-tie", Type: policy.Cleanup, Since: at(2)},
	}
	for _, c := range []struct {
		running int
		want    []string
	}{
		{0, []string{"heal-early", "heal-late", "scale-early", "a-tie"}},
		{3, []string{"heal-early"}},
		{4, nil},
		{9, nil},
	} {
		require.Equal(t, c.want, policy.Grant(slices.Clone(queue), c.running, policy.MaxLimited))
	}
}
