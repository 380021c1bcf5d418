package availability

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/system"
)

// damage makes the application's program unreadable from its first page on in
// every image on a node's disk, as a failing disk might, so that it starts and
// dies. It returns how to mend that. Nothing may run there.
func (s *scene) damage(n *system.Node) (mend func()) {
	s.t.Helper()
	const program, whole = "testapp", 4096
	var found []string
	require.NoError(s.t, filepath.WalkDir(n.Path("docker", "data"), func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() && e.Name() == program {
			found = append(found, path)
		}
		return nil // what goes away meanwhile is no image
	}))
	require.NotEmpty(s.t, found)
	for _, path := range found {
		good, err := os.ReadFile(path)
		require.NoError(s.t, err)
		clear(good[whole:])
		require.NoError(s.t, os.Rename(path, path+".good"))
		require.NoError(s.t, os.WriteFile(path, good, 0o755))
	}
	return func() {
		for _, path := range found {
			require.NoError(s.t, os.Rename(path+".good", path))
		}
	}
}

// PRI-5: a failback whose copy does not run leaves the backup serving; it is
// tried again when somebody asks, and then succeeds.
func TestPriority_FailbackFails(t *testing.T) {
	s := newScene(t, 3)
	s.enable("--mode", "failover", "--priority", "node-2,node-1,node-3", "--failback-delay", "1h", "--drain", "3s")
	s.await(soon, "web", "the primary has the image", func(v view) bool {
		for _, p := range v.Placements {
			if p.Node == "node-2" {
				return p.Want == "prepared" && p.ImageReady
			}
		}
		return false
	})
	mend := s.damage(s.node("node-2"))
	id, started := s.web.ID(), s.web.Inspect().State.StartedAt

	run, stop := s.traffic(), s.observe("web")
	begin := time.Now()
	s.MustCLI("ha", "update", "web", "--failback-delay", "1s")
	s.await(2*time.Minute, "web", "a failback was tried", func(v view) bool { return len(s.ended("web", "failback")) == 1 && v.Operation == nil })
	failed := s.last("web", "failback")
	require.Equal(t, "failed", failed.Status)
	t.Logf("failed after %v: %s: %s", failed.FinishedAt.Sub(begin).Round(time.Millisecond), failed.Code, failed.Message)
	s.Env.Await(soon, "nothing is left of it", func() bool { return len(s.containersOn(s.node("node-2"), "web")) == 0 })
	time.Sleep(5 * time.Second) // the delay and more
	for _, v := range stop() {
		require.Equal(t, []string{"node-1"}, v.ServingFrom)
		require.True(t, v.OnBackup)
		require.NotEqual(t, "degraded", v.Health)
	}
	v := s.view("web")
	require.NotNil(t, v.Problem)
	require.Equal(t, failed.Code, v.Problem.Code)
	require.Nil(t, v.Operation)
	require.Len(t, s.ended("web", "failback"), 1, "it is not tried again soon")
	now := s.web.Inspect()
	require.Equal(t, id, now.ID)
	require.Equal(t, started, now.State.StartedAt, "the backup was left alone")

	// The cause is gone, and somebody asks.
	mend()
	s.MustCLI("ha", "retry", "web")
	s.await(soon, "web", "the primary serves", from("node-2"))
	s.lossless(run)
	v = s.view("web")
	require.False(t, v.OnBackup)
	require.Nil(t, v.Problem)
	require.Equal(t, "completed", s.last("web", "failback").Status)
	require.Len(t, s.ended("web", "failback"), 2)
}
