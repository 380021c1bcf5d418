package e2e

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/system"
)

func readFile(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(data)
}

func drainWhole(resp *http.Response) error {
	defer resp.Body.Close()
	n, err := io.Copy(io.Discard, resp.Body)
	if err == nil && resp.ContentLength >= 0 && n != resp.ContentLength {
		err = fmt.Errorf("%d of %d bytes", n, resp.ContentLength)
	}
	return err
}

// LNK-7: the sidecar restarts under load: no refused connection, no failure,
// and streams that run go on.
func TestSidecar_RestartsUnderLoad(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 2, Nodes: 2}, false)
	run := sc.steady(5 * time.Minute)
	download := sc.startDownload(t, 10)
	for i := range 4 {
		sc.Env.Await(10*time.Second, "load flows", func() bool { return len(run.Results()) > (i+1)*400 })
		pid := sc.Ingress.Process.Pid()
		if i > 0 {
			pid, _ = strconv.Atoi(strings.TrimSpace(readFile(t, sc.Ingress.Path("ingress.pid"))))
		}
		require.NoError(t, syscall.Kill(pid, syscall.SIGHUP))
		endAtCleanup(t, successor(sc.Env, sc.Ingress.Path("ingress.pid"), pid))
		<-time.After(betweenRounds)
	}
	report := run.Stop()
	t.Logf("\n%s", report)
	require.Empty(t, report.Failed(""), report.Describe(report.Failed(""), 20))
	require.Empty(t, report.Join(sc.Env.Deliveries()).DoubledBy("POST"))
	require.NoError(t, <-download)
}

// LNK-8, EVT-3: NATS (and the controller with it) is away for a minute while
// placements change: no link closes by it, routing follows the changes by the
// relays' word, and 2 s after its return everything is right.
func TestSidecar_NATSAway(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 2, Nodes: 3}, true)
	run := sc.steady(5 * time.Minute)
	sc.Controller.Process.Kill()
	away := time.Now()
	sc.Env.Await(15*time.Second, "the sidecar notices", func() bool {
		st, err := sc.IngressStatus()
		return err == nil && st.NATS != "connected"
	})
	require.Equal(t, "open", sc.LinkState(link("node-1")))
	require.Equal(t, "open", sc.LinkState(link("node-2")))
	// node-2 stops in good order and the standby's node gets a serving copy.
	sc.apps["node-2"].Stop(20)
	sc.Env.Await(3*time.Second, "routing follows without NATS", func() bool { return sc.LinkState(link("node-2")) != "open" })
	for time.Since(away) < 60*time.Second {
		require.Equal(t, "open", sc.LinkState(link("node-1")))
		<-time.After(time.Second)
	}
	sc.apps["node-2"].Start()
	sc.apps["node-1"].Stop(20)
	sc.Controller.Process.Start()
	sc.Env.Await(20*time.Second, "NATS is back", func() bool {
		st, err := sc.IngressStatus()
		return err == nil && st.NATS == "connected"
	})
	took := sc.AwaitLinks(2*time.Second, "open", link("node-2"))
	require.NotEqual(t, "open", sc.LinkState(link("node-1")))
	t.Logf("right %v after NATS was back", took.Round(time.Millisecond))
	sc.Env.Await(5*time.Second, "the controller shows it", func() bool {
		out, err := sc.CLI("status")
		return err == nil && strings.Contains(out, "node-2=serving")
	})
	report := run.Stop()
	t.Logf("\n%s", report)
	failed := sc.butReloads(report.Failed("")) // 30 s after the first change nginx's lists follow
	require.Empty(t, failed, report.Describe(failed, 20))
}

// A node agent that restarts (an upgrade) loses nothing: its links are taken
// out of routing, its streams finish, and the containers run on.
func TestAgent_RestartsUnderLoad(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 2, Nodes: 2}, false)
	run := sc.steady(2 * time.Minute)
	for i := range 4 {
		n := sc.Nodes[i%2]
		sc.Env.Await(10*time.Second, "load flows", func() bool { return len(run.Results()) > (i+1)*300 })
		require.True(t, n.Agent.Stop(15*time.Second), "the agent ends by itself")
		n.Agent.Start()
		sc.AwaitLinks(15*time.Second, "open", link(n.ID))
		<-time.After(betweenRounds)
	}
	report := run.Stop()
	t.Logf("\n%s", report)
	require.Empty(t, report.Failed(""), report.Describe(report.Failed(""), 20))
	require.Empty(t, report.Join(sc.Env.Deliveries()).DoubledBy("POST"))
}
