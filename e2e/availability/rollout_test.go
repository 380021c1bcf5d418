package availability

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/system"
)

// bounds watches how many placements serve and shall run, until it is stopped.
type bounds struct {
	least, most int
	stop        func()
}

func (s *scene) watch() *bounds {
	b := &bounds{least: 99}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(50 * time.Millisecond):
			}
			st, err := s.IngressStatus()
			if err != nil {
				continue
			}
			open := 0
			for _, l := range st.Links {
				if strings.HasPrefix(l.Link, "web.") && l.State == "open" {
					open++
				}
			}
			running := 0
			for _, all := range s.copies("web") {
				for _, c := range all {
					if strings.HasSuffix(c, " running") {
						running++
					}
				}
			}
			b.least, b.most = min(b.least, open), max(b.most, running)
		}
	})
	b.stop = func() { close(done); wg.Wait() }
	return b
}

// download fetches a body that takes about the given time and returns how many
// bytes came.
func (s *scene) download(seconds int) <-chan string {
	out := make(chan string, 1)
	go func() {
		client := &http.Client{Transport: &http.Transport{DialContext: s.Client().DialContext}}
		req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://%s/download?seconds=%d", s.Ingress.HostPort(system.HTTPPort), seconds), nil)
		if err != nil {
			out <- err.Error()
			return
		}
		req.Host = host
		resp, err := client.Do(req)
		if err != nil {
			out <- err.Error()
			return
		}
		defer resp.Body.Close()
		n, err := io.Copy(io.Discard, resp.Body)
		out <- fmt.Sprintf("%d %v length %d, %d", resp.StatusCode, err, resp.ContentLength, n)
	}()
	return out
}

// ROL-1, ROL-3, RTE-8: a rolling update under traffic loses nothing, stays
// within its bounds and lets a running download end; a newer one cancels an
// older (ROL-6).
func TestRollout_UnderTraffic(t *testing.T) {
	s := newScene(t, 4)
	s.enable("--mode", "replicated", "--replicas", "3")
	s.settle()
	before := s.view("web")
	reloads := s.reloads()
	run := s.traffic()
	slow := s.download(20)
	seen := s.watch()
	start := time.Now()
	require.Equal(t, "completed", s.rollout(2*time.Minute, "--env", "VERSION=2").Status)
	t.Logf("rollout of 3 placements took %v", time.Since(start).Round(time.Millisecond))
	seen.stop()
	require.GreaterOrEqual(t, seen.least, 3, "maxUnavailable 0")
	require.LessOrEqual(t, seen.most, 4, "maxSurge 1")
	require.LessOrEqual(t, s.reloads()-reloads, 2, "RTE-8")
	t.Logf("%d reloads of nginx", s.reloads()-reloads)
	got := <-slow
	require.Regexp(t, `^200 <nil>`, got)
	t.Log("download beside it: " + got)
	after := s.view("web")
	require.Greater(t, after.Generation, before.Generation)
	for _, p := range after.Placements {
		if p.Want == "serving" {
			require.Equal(t, after.Generation, p.Generation, "%s runs the new version", p.Node)
		}
	}
	s.requireEnv("VERSION=2")

	// A newer version cancels the one at work.
	s.MustCLI("ha", "rollout", "web", "--env", "VERSION=3", "--no-wait")
	s.await(30*time.Second, "web", "the rollout is at work", func(v view) bool { return v.Operation != nil && v.Operation.Status == "running" })
	require.Equal(t, "completed", s.rollout(2*time.Minute, "--env", "VERSION=4").Status)
	s.steady("web")
	s.lossless(run)
	s.requireEnv("VERSION=4")
	cancelled := 0
	for _, op := range s.operations("web") {
		if op.Type == "rollout" && op.Status == "cancelled" {
			cancelled++
		}
	}
	require.Equal(t, 1, cancelled, "ROL-6")
}

// rollout brings out a version and waits until the operation is over.
func (s *scene) rollout(within time.Duration, args ...string) operation {
	s.t.Helper()
	s.MustCLI(append([]string{"ha", "rollout", "web", "--no-wait"}, args...)...)
	id := ""
	for _, op := range s.operations("web") {
		if op.Type == "rollout" && op.FinishedAt.IsZero() {
			id = op.ID // the newest of the queue is the last
		}
	}
	var end operation
	s.await(within, "web", "operation "+id+" is over", func(view) bool {
		for _, op := range s.operations("web") {
			if op.ID == id && !op.FinishedAt.IsZero() {
				end = op
				return true
			}
		}
		return false
	})
	for _, step := range end.Steps {
		s.t.Logf("%s %s", step.At.Format("15:04:05.000"), step.Name)
	}
	return end
}

// reloads counts the starts of nginx's workers so far, by its error log.
func (s *scene) reloads() int {
	s.t.Helper()
	log, err := os.ReadFile(s.Ingress.Path("log", "error.log"))
	require.NoError(s.t, err)
	return strings.Count(string(log), "reconfiguring")
}

// requireEnv fails unless every running copy has the variable.
func (s *scene) requireEnv(want string) {
	s.t.Helper()
	var run []string
	for _, node := range s.Nodes {
		for _, c := range node.Containers() {
			if c.State != "running" || c.Labels["opfield.workload"] != "web" {
				continue
			}
			run = append(run, node.ID+c.Names[0])
			require.Contains(s.t, node.Inspect(c.ID).Config.Env, want, "on %s", node.ID)
		}
	}
	require.Len(s.t, run, 3)
}

// ROL-2, ROL-5: a version that does not start is given up after three attempts;
// what served is untouched, the error is kept.
func TestRollout_Broken(t *testing.T) {
	s := newScene(t, 3)
	s.enable("--mode", "replicated", "--replicas", "2", "--max-unavailable", "0")
	ids := map[string]string{}
	for _, p := range s.view("web").Placements {
		if p.Want == "serving" {
			ids[p.Node] = p.ContainerID
		}
	}
	run := s.traffic()
	start := time.Now()
	require.Equal(t, "failed", s.rollout(4*time.Minute, "--command", "nosuch").Status)
	t.Logf("rolled back after %v", time.Since(start).Round(time.Second))
	s.lossless(run)
	v := s.view("web")
	require.NotNil(t, v.Problem)
	require.Equal(t, "AVAILABILITY_RESTART_LOOP", v.Problem.Code)
	require.Equal(t, 3, s.last("web", "rollout").Attempts)
	for _, p := range v.Placements {
		if p.Want == "serving" {
			require.Equal(t, ids[p.Node], p.ContainerID, "the copy on %s is untouched", p.Node)
		}
	}
	require.Equal(t, 2, v.Serving)
	require.Equal(t, "completed", s.rollout(2*time.Minute, "--env", "GOOD=1").Status)
	require.Nil(t, s.view("web").Problem, "a good version ends the problem")
}
