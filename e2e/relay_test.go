package e2e

import (
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/load"
	"github.com/opfield/availability/e2e/system"
)

// successor waits until the pid file names another process than pid.
func successor(env *lab.Env, file string, pid int) int {
	var next int
	env.Await(10*time.Second, "a successor has taken over", func() bool {
		data, err := os.ReadFile(file)
		if err != nil {
			return false
		}
		next, err = strconv.Atoi(strings.TrimSpace(string(data)))
		return err == nil && next != pid
	})
	return next
}

// endAtCleanup ends a process that the lab does not know of.
func endAtCleanup(t *testing.T, pid int) {
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
}

// RLY-6: with another relay alive, a killed relay costs nothing but the POSTs
// that were in flight through it.
func TestRelay_KilledWithAnother(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 2, Nodes: 2}, false)
	ends := map[string]bool{sc.endpoint(link("node-1")): true, sc.endpoint(link("node-2")): true}
	run := sc.steady(5 * time.Minute)
	for i := range 4 {
		sc.Env.Await(10*time.Second, "load flows", func() bool { return len(run.Results()) > (i+1)*400 })
		r := sc.Relays[i%2]
		r.Process.Kill()
		<-time.After(time.Second)
		r.Process.Start()
		sc.Env.Await(10*time.Second, "every relay is back", func() bool {
			st, err := sc.IngressStatus()
			return err == nil && len(st.Relays) == 2 && st.Relays[0].Connected && st.Relays[1].Connected
		})
		<-time.After(betweenRounds)
	}
	report := run.Stop()
	t.Logf("\n%s", report)
	joined := report.Join(sc.Env.Deliveries())
	failed := sc.requirePOSTsSentTo(report, func(load.Result, string) bool { return false }, ends)
	for _, f := range report.Failed("POST") {
		require.Less(t, f.Latency, time.Second, "POST %s", f.ID)
	}
	t.Logf("failed POSTs, in flight through the relay: %d (%d had reached the application)", failed, failed-len(joined.FailedUndelivered))
}

// RLY-4, LNK-4: the only relay restarts with announcement: nothing fails, and
// streams that run go on.
func TestRelay_OnlyOneRestarts(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 1, Nodes: 2}, false)
	relay := sc.Relays[0]
	run := sc.steady(5 * time.Minute)
	download := sc.startDownload(t, 8)
	for i := range 3 {
		sc.Env.Await(10*time.Second, "load flows", func() bool { return len(run.Results()) > (i+1)*400 })
		pid := relay.Process.Pid()
		if i > 0 {
			pid, _ = strconv.Atoi(strings.TrimSpace(readFile(t, relay.Path("relay.pid"))))
		}
		require.NoError(t, syscall.Kill(pid, syscall.SIGHUP))
		endAtCleanup(t, successor(sc.Env, relay.Path("relay.pid"), pid))
		<-time.After(betweenRounds)
	}
	report := run.Stop()
	t.Logf("\n%s", report)
	require.Empty(t, report.Failed(""), report.Describe(report.Failed(""), 20))
	require.Empty(t, report.Join(sc.Env.Deliveries()).DoubledBy("POST"))
	require.NoError(t, <-download)

	// A plain stop and a start a little later: connections are held.
	run = sc.steady(time.Minute)
	sc.Env.Await(10*time.Second, "load flows", func() bool { return len(run.Results()) > 200 })
	pid, _ := strconv.Atoi(strings.TrimSpace(readFile(t, relay.Path("relay.pid"))))
	require.NoError(t, syscall.Kill(pid, syscall.SIGTERM))
	sc.Env.Await(30*time.Second, "the relay has ended", func() bool { return syscall.Kill(pid, 0) != nil })
	<-time.After(2 * time.Second)
	relay.StartAnother()
	sc.AwaitRoute(10*time.Second, webHost)
	<-time.After(time.Second)
	report = run.Stop()
	t.Logf("stopped and started:\n%s", report)
	require.Empty(t, report.Failed("GET"), report.Describe(report.Failed("GET"), 20))
	require.LessOrEqual(t, report.Latency(nil).Max, 8500*time.Millisecond)
}

// LNK-4: without announcement connections are held for 3 s.
func TestRelay_OnlyOneKilled(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 1, Nodes: 2}, false)
	relay := sc.Relays[0]
	relay.Process.Kill()
	begun := time.Now()
	status, _ := system.GetHost(sc.Client(), sc.Ingress.HostPort(system.HTTPPort), webHost, "/ok")
	held := time.Since(begun)
	t.Logf("without any relay: %d after %v", status, held.Round(time.Millisecond))
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.InDelta(t, 3, held.Seconds(), 1.2)
	// One that comes back in time costs nothing but the wait.
	answered := make(chan int, 1)
	go func() {
		status, _ := system.GetHost(sc.Client(), sc.Ingress.HostPort(system.HTTPPort), webHost, "/ok")
		answered <- status
	}()
	<-time.After(time.Second)
	relay.Process.Start()
	require.Equal(t, http.StatusOK, <-answered)
}

// startDownload begins a download of some seconds; the channel gets nil when
// it arrived whole.
func (sc *scene) startDownload(t *testing.T, seconds int) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	client := &http.Client{Transport: &http.Transport{DialContext: sc.Client().DialContext}}
	req, err := http.NewRequest(http.MethodGet, "http://"+sc.Ingress.HostPort(system.HTTPPort)+"/download?seconds="+strconv.Itoa(seconds), nil)
	require.NoError(t, err)
	req.Host = webHost
	resp, err := client.Do(req)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode)
	go func() { done <- drainWhole(resp) }()
	return done
}
