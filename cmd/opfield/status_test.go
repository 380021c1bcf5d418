package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

func report() api.Report {
	long := time.Now().Add(-90 * time.Second)
	link := func(id, state, reason string) bus.LinkStatus {
		return bus.LinkStatus{Link: id, Address: "127.64.0.1", State: state, Reason: reason, Since: long, Streams: 3}
	}
	event := func(node string, role placement.Role, ready bool) placement.Event {
		return placement.Event{Node: node, Role: role, Ready: ready, State: placement.StateRunning}
	}
	return api.Report{
		NATS: "connected",
		Ingresses: []api.ProcessView{{ID: "edge", State: api.Online, Ingress: &bus.IngressStatus{Links: []bus.LinkStatus{
			link("shop.n1:80", "open", ""), link("shop.n2:80", "joined", "joined to open siblings: placement is not ready"),
		}}}},
		Routes: []api.RouteView{{
			Name: "shop", Ingresses: []api.RouteOnIngress{{Ingress: "edge", Health: "online"}},
			Placements: []placement.Event{event("n1", placement.RoleServing, true), event("n2", placement.RoleServing, false), event("n3", placement.RoleStandby, false)},
		}},
	}
}

func TestStatus_Render(t *testing.T) { // API-3
	var out bytes.Buffer
	require.NoError(t, (&statusCmd{}).render(&out, report()))
	require.Regexp(t, `(?m)^LINK +INGRESS +STATE +AGE +STREAMS +ADDRESS +REASON$`, out.String())
	require.Regexp(t, `(?m)^shop.n2:80 +edge +joined +1m30s +3 +127.64.0.1 +joined to open siblings: placement is not ready$`, out.String())
	require.Regexp(t, `(?m)^shop +edge=online +n1=serving, n2=not ready, n3=standby$`, out.String())
	require.NotContains(t, out.String(), "shop.n1:80")
	require.Contains(t, out.String(), "open links: 1 (--links")
	out.Reset()
	require.NoError(t, (&statusCmd{Links: true}).render(&out, report()))
	require.Contains(t, out.String(), "shop.n1:80")
	require.NotContains(t, out.String(), "--links")
}

// terminal returns both ends of a pseudo-terminal.
func terminal(t *testing.T) (screen, program *os.File) {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { screen.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(screen.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(screen.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	program, err = os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { program.Close() })
	return screen, program
}

// A terminal shows each picture over the last one, also while the controller
// is away; a file gets plain text.
func TestStatus_Watch(t *testing.T) { // API-3
	socket := filepath.Join(t.TempDir(), "s")
	ln, err := net.Listen("unix", socket)
	require.NoError(t, err)
	calls := make(chan int, 100)
	n := 0
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n++
		calls <- n
		if n == 2 {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		_ = json.NewEncoder(w).Encode(report())
	})}
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { srv.Close() })

	watch := func(out io.Writer) (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		s := &session{ctx: ctx, client: newClient(socket, io.Discard), out: out, talk: io.Discard}
		go func() { done <- (&statusCmd{Watch: true}).Run(s) }()
		return func() { cancel(); require.NoError(t, <-done) }
	}
	screen, program := terminal(t)
	stop := watch(program)
	for <-calls < 3 {
	}
	var seen strings.Builder
	b := make([]byte, 4096)
	for strings.Count(seen.String(), topLeft) < 3 {
		n, err := screen.Read(b)
		require.NoError(t, err)
		seen.Write(b[:n])
	}
	stop()
	require.Equal(t, 1, strings.Count(seen.String(), firstScreen))
	require.Contains(t, seen.String(), "NATS connected"+restOfLine)
	require.Contains(t, seen.String(), "WARNING the controller answered 502")
	require.Contains(t, seen.String(), restOfAll)

	var file syncBuffer
	stop = watch(&file)
	require.Eventually(t, func() bool { return strings.Contains(file.String(), "shop.n2:80") }, soon, poll)
	stop()
	require.NotContains(t, file.String(), "\x1b")
}

func TestNodeRows_NameOfAnOperator(t *testing.T) { // API-1
	rows := nodeRows([]api.NodeView{{ID: "node-1"}, {ID: "node-2", Name: "rack 7"}})
	require.Equal(t, "node-1", rows[1][0])
	require.Equal(t, "node-2 (rack 7)", rows[2][0])
}

func TestPlacementReason(t *testing.T) {
	p := policy.PlacementView{Reason: "container web: it does not run; no room; no room", Outside: "somebody stopped it"}
	require.Equal(t, "container web: it does not run; no room; somebody stopped it", placementReason(p))
	p.Fault = &placement.Fault{Code: "CODE", Message: "no room"}
	require.Equal(t, "no room (CODE); container web: it does not run; somebody stopped it", placementReason(p))
	require.Empty(t, placementReason(policy.PlacementView{}))
}

func TestImageOf(t *testing.T) {
	require.Equal(t, "registry/web:1@sha256:2", imageOf(policy.View{Workload: "web", Image: "registry/web:1@sha256:2"}))
	require.Equal(t, "web@sha256:2 (image id ad5912735c3a)", imageOf(policy.View{Workload: "web", Image: "sha256:ad5912735c3abf2d@sha256:2"}))
}
