package availability

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// rolloutPhases returns those that a rollout passes through and that can be
// seen: selecting_nodes shows only if there is no room, and finalizing for no
// longer than one decision.
func rolloutPhases() []string {
	return []string{"queued", "preparing_images", "starting", "checking_health", "activating_routes", "draining", "cleaning_up"}
}

// OPS-3, ROL-4: a controller that is killed in every phase completes what it
// began; nothing is done twice.
func TestRollout_ControllerKilled(t *testing.T) {
	s := newScene(t, 4)
	s.enable("--mode", "replicated", "--replicas", "3", "--drain", "20s")
	// Many megabytes and a health check let phases last; behind a restart a
	// rollout is queued.
	image := s.Nodes[0].BuildBig("opfield/testapp:big", 20)
	run := s.traffic()
	s.MustCLI("ha", "restart", "web", "--no-wait")
	s.MustCLI("ha", "rollout", "web", "--no-wait", "--image", image, "--env", "VERSION=2")
	begin := time.Now()
	var slow []<-chan string
	killed, cut := map[string]time.Time{}, false
	heal := func() {
		if cut {
			cut = false
			s.Env.HealBetween(s.Ingress.Host, s.Controller.Host)
		}
	}
	for deadline := begin.Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(deadline), "the rollout completes: %v", killed)
		phase, done := s.rolloutPhase()
		if done {
			break
		}
		switch _, again := killed[phase]; {
		case phase == "checking_health" && again && killed["activating_routes"].IsZero() && !cut:
			// The ingress node gets the readiness from the relays and cannot tell
			// that it leads to the new copy.
			cut = true
			s.Env.CutBetween(s.Ingress.Host, s.Controller.Host)
		case phase != "" && phase != "checking_health" && phase != "activating_routes":
			heal()
		}
		if phase == "" || !killed[phase].IsZero() {
			continue
		}
		killed[phase] = time.Now()
		s.Controller.Process.Kill()
		s.Controller.Process.Start()
		heal()
		if phase == "starting" { // what is drained has something to end
			for range 3 {
				slow = append(slow, s.download(15))
			}
		}
		s.Env.Await(20*time.Second, "the controller answers", func() bool {
			var v view
			return s.API("/v1/availability/web", &v) == nil
		})
	}
	heal()
	for phase, at := range killed {
		t.Logf("killed in %s after %v", phase, at.Sub(begin).Round(time.Millisecond))
	}
	t.Logf("done after %v", time.Since(begin).Round(time.Millisecond))
	require.Subset(t, slices.Collect(maps.Keys(killed)), rolloutPhases())
	for _, d := range slow {
		require.Regexp(t, `^200 <nil>`, <-d)
	}
	s.steady("web")
	s.lossless(run)
	s.requireEnv("VERSION=2")
	op := s.last("web", "rollout")
	require.Equal(t, "completed", op.Status)
	require.Zero(t, op.Attempts, "no attempt failed")
	require.Equal(t, "completed", s.last("web", "restart").Status)
	steps := map[string]int{}
	for _, step := range op.Steps {
		t.Logf("%s %s", step.At.Format("15:04:05.000"), step.Name)
		steps[step.Name]++
	}
	for name, n := range steps {
		require.Equal(t, 1, n, "%s: once", name)
	}
}

// rolloutPhase is the phase of the rollout, "" if that is not to be seen now.
func (s *scene) rolloutPhase() (phase string, done bool) {
	var v view
	if s.API("/v1/availability/web", &v) != nil {
		return "", false
	}
	all := v.Queued
	if v.Operation != nil {
		all = append(all, *v.Operation)
	}
	for _, op := range all {
		if op.Type == "rollout" {
			return op.Phase, false
		}
	}
	return "", v.Operation == nil && v.Generation > 1 && v.Serving == 3
}
