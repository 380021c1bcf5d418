package lab_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/delivery"
	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/load"
)

func TestHost_NetworkFaults(t *testing.T) {
	env := lab.New(t)
	a, b, c := env.Host("a"), env.Host("b"), env.Host("c")
	ln, err := b.Listen("tcp", ":7000")
	require.NoError(t, err)
	defer ln.Close()
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				buf := make([]byte, 1)
				for {
					if _, err := conn.Read(buf); err != nil {
						return
					}
					if _, err := conn.Write(buf); err != nil {
						return
					}
				}
			}()
		}
	}()
	dial := func(from *lab.Host, within time.Duration) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(context.Background(), within)
		defer cancel()
		return from.DialContext(ctx, "tcp", b.HostPort(7000))
	}
	conn, err := dial(a, time.Second)
	require.NoError(t, err)
	defer conn.Close()
	answered := func(within time.Duration) error {
		if err := conn.SetDeadline(time.Now().Add(within)); err != nil {
			return err
		}
		if _, err := conn.Write([]byte("x")); err != nil {
			return err
		}
		_, err := conn.Read(make([]byte, 1))
		return err
	}
	require.NoError(t, answered(time.Second))

	b.Cut()
	require.ErrorIs(t, answered(300*time.Millisecond), os.ErrDeadlineExceeded, "a cut is silent: no reset")
	_, err = dial(c, 300*time.Millisecond)
	var timeout net.Error
	require.ErrorAs(t, err, &timeout)
	require.True(t, timeout.Timeout(), "%v", err)
	b.Heal()
	require.NoError(t, conn.SetDeadline(time.Now().Add(5*time.Second)))
	_, err = conn.Read(make([]byte, 1))
	require.NoError(t, err, "what was sent during the cut arrives after it")

	env.CutBetween(a, b)
	_, err = dial(a, 300*time.Millisecond)
	require.Error(t, err)
	_, err = dial(c, time.Second)
	require.NoError(t, err, "other hosts still reach it")
	env.HealBetween(a, b)
	_, err = dial(a, 5*time.Second)
	require.NoError(t, err)

	b.AllowOnly(22)
	_, err = dial(c, 300*time.Millisecond)
	require.Error(t, err)
	b.AllowOnly(22, 7000)
	_, err = dial(c, 5*time.Second)
	require.NoError(t, err)

	b.LosePercent(100)
	_, err = dial(c, 300*time.Millisecond)
	require.Error(t, err)
	b.Heal()
	b.LosePercent(20)
	_, err = dial(c, 20*time.Second)
	require.NoError(t, err)
}

func TestProcess_Life(t *testing.T) {
	env := lab.New(t)
	h := env.Host("a")
	p := h.Start("app", env.Binary("./e2e/testapp"), "serve", "--name", "a/app", "--record", h.Path("record"), "--drain", "100ms")
	run := load.Start(load.Config{
		Dial: h.DialContext, Address: "127.0.0.1:8080", Duration: 2 * time.Second,
		Streams: []load.Stream{{Name: "wait", Method: "GET", Path: "/ok", Rate: 50, Fresh: true}},
	})
	env.Await(5*time.Second, "the application answers", func() bool {
		for _, r := range run.Results() {
			if r.OK() {
				return true
			}
		}
		return false
	})
	run.Stop()
	_, err := net.DialTimeout("tcp", "127.0.0.1:9000", 100*time.Millisecond)
	require.Error(t, err, "the host's loopback is its own")

	run = load.Start(load.Config{
		Dial: h.DialContext, Address: "127.0.0.1:8080", Duration: 1500 * time.Millisecond, Timeout: 5 * time.Second,
		Streams: []load.Stream{
			{Name: "get-fresh", Method: "GET", Path: "/ok", Rate: 200, Fresh: true},
			{Name: "get-kept", Method: "GET", Path: "/slow?ms=5", Rate: 200},
			{Name: "post-kept", Method: "POST", Path: "/ok", Rate: 50, Body: []byte("hello")},
			{Name: "status", Method: "GET", Path: "/status?code=503", Rate: 10},
			{Name: "abort", Method: "GET", Path: "/abort?total=20000&bytes=10000", Rate: 10},
			{Name: "close", Method: "GET", Path: "/until-close?bytes=5000", Rate: 10},
		},
	})
	report := run.Wait()
	t.Logf("\n%s", report)
	require.Len(t, report.Results, 300+300+75+15+15+15)
	for _, res := range report.Results {
		switch res.Stream {
		case "status":
			require.Equal(t, 503, res.Status)
			require.Equal(t, load.Complete, res.Kind)
		case "abort":
			require.Equal(t, load.Cut, res.Kind)
		default:
			require.True(t, res.OK(), "%+v", res)
			if res.Stream == "get-fresh" {
				require.True(t, res.First)
			}
		}
	}
	require.Less(t, report.Latency(nil).Max, 2*time.Second)
	records, err := delivery.ReadFile(h.Path("record"))
	require.NoError(t, err)
	joined := report.Join(records)
	require.Empty(t, joined.Doubled)
	require.Empty(t, joined.Phantom)
	require.Empty(t, joined.FailedUndelivered)
	require.Len(t, joined.FailedDelivered, 30)

	p.Pause()
	run = load.Start(load.Config{Dial: h.DialContext, Address: "127.0.0.1:8080", Duration: time.Second, Timeout: 300 * time.Millisecond,
		Streams: []load.Stream{{Name: "paused", Method: "GET", Path: "/ok", Rate: 5}}})
	for _, res := range run.Wait().Results {
		require.Equal(t, load.TimedOut, res.Kind)
	}
	p.Continue()
	require.True(t, p.Stop(5*time.Second))
	require.False(t, p.Running())
	require.True(t, p.Logged("ends"))
	p.Start()
	require.True(t, p.Running())
	h.PowerOff()
	<-p.Done()
}

func TestNode_RunsContainers(t *testing.T) {
	env := lab.New(t)
	start := time.Now()
	nodes := env.Nodes("node-1", "node-2")
	t.Logf("two engines with images after %v", time.Since(start))
	n := nodes[0]
	start = time.Now()
	c := n.RunApp(lab.App{Workload: "web", Health: true})
	t.Logf("container started in %v", time.Since(start))
	address := c.Addr(8080).String()
	env.Await(10*time.Second, "healthy", func() bool { return c.Inspect().State.Health.Status == "healthy" })
	get := func() *load.Report {
		return load.Start(load.Config{Dial: n.DialContext, Address: address, Duration: time.Second,
			Streams: []load.Stream{{Name: "get", Method: "GET", Path: "/ok", Rate: 20}}}).Wait()
	}
	report := get()
	require.Empty(t, report.Failed(""), report)
	joined := report.Join(env.Deliveries())
	require.Empty(t, joined.Phantom)
	require.Equal(t, "node-1/web", joined.Deliveries[report.Results[0].ID][0].By)

	c.SetHealthy(false)
	env.Await(10*time.Second, "unhealthy", func() bool { return c.Inspect().State.Health.Status == "unhealthy" })
	c.SetHealthy(true)
	c.Kill("KILL")
	env.Await(5*time.Second, "dead", func() bool { return !c.Inspect().State.Running })
	require.Len(t, get().Failed("GET"), 20)
	c.Start()
	env.Await(5*time.Second, "back", func() bool { return len(get().Failed("")) == 0 })
	c.Pause()
	c.Unpause()

	n.PowerOff()
	require.False(t, n.Engine.Running())
	require.Len(t, c.Deliveries(), len(c.Deliveries()))
	n.Heal()
	n.Engine.Start()
	require.NoError(t, n.AwaitEngine())
	require.False(t, c.Inspect().State.Running)
}

// TestRemoveStale_AfterKill makes an environment in another process, kills
// that, and looks for what is left.
func TestRemoveStale_AfterKill(t *testing.T) {
	if os.Getenv("LAB_VICTIM") != "" {
		env := lab.New(t)
		n := env.Node("node-1")
		n.RunApp(lab.App{Workload: "web"})
		n.Start("sleep", "sleep", "1000")
		fmt.Printf("ready %s\n", env.Dir())
		select {}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestRemoveStale_AfterKill$")
	cmd.Env = append(os.Environ(), "LAB_VICTIM=1")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var text strings.Builder
	buf := make([]byte, 4096)
	for !strings.Contains(text.String(), "ready ") {
		n, err := out.Read(buf)
		require.NoError(t, err, text.String())
		text.Write(buf[:n])
	}
	dir := strings.Fields(text.String()[strings.Index(text.String(), "ready "):])[1]
	require.NoError(t, cmd.Process.Signal(syscall.SIGKILL))
	_ = cmd.Wait()
	require.DirExists(t, dir)

	require.NoError(t, lab.RemoveStale())
	require.NoDirExists(t, dir)
	left, err := filepath.Glob("/run/netns/" + filepath.Base(dir) + "*")
	require.NoError(t, err)
	require.Empty(t, left)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	require.NotContains(t, string(mounts), dir)
	entries, err := os.ReadDir("/proc")
	require.NoError(t, err)
	for _, e := range entries {
		cmdline, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		require.NotContains(t, string(cmdline), dir)
	}
}
