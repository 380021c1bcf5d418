// Package carry_test runs the carrying-out part of the node agent on a real
// Docker engine, with a real registry beside it.
package carry_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem" // registers the driver
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
	"github.com/sirupsen/logrus"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/node"
	"github.com/opfield/availability/node/carry"
	"github.com/opfield/availability/placement"
)

const (
	socketEnv = "CARRY_TEST_SOCKET" // set in the process that is the agent
	dirEnv    = "CARRY_TEST_DIR"
	// registryAddr is inside of each node's network.
	registryAddr = "127.0.0.1:7447"
)

// printed is one line of the agent's output.
type printed struct {
	At    time.Time
	Event placement.Event
}

// printer is a bus that writes every event to stdout, and has a certificate
// for every name.
type printer struct{ mu sync.Mutex }

func (p *printer) PublishPlacement(_ context.Context, e placement.Event) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return json.NewEncoder(os.Stdout).Encode(printed{time.Now(), e})
}

func (p *printer) LastPlacement(context.Context, placement.ID) (placement.Event, bool, error) {
	return placement.Event{}, false, nil
}
func (p *printer) Set([]placement.Event)                {}
func (p *printer) Get(string) (*tls.Certificate, error) { return &tls.Certificate{}, nil }
func (p *printer) Ensure(context.Context, string) error { return nil }

// local is the internal registry as the node's Docker sees it.
type local struct{}

func (local) Reference(i placement.Image) string {
	ref := registryAddr + "/" + i.Repository
	if i.Digest != "" {
		ref += "@" + i.Digest
	}
	return ref
}
func (local) Auth() string { return "" }

// TestAgentProcess is the agent of the tests below: it runs as a process
// inside a host, and is told what is desired over a socket.
func TestAgentProcess(t *testing.T) {
	socket, dir := os.Getenv(socketEnv), os.Getenv(dirEnv)
	if socket == "" {
		return // it proves nothing alone
	}
	engine, err := client.NewClientWithOpts(client.WithHost(socket), client.WithAPIVersionNegotiation())
	require.NoError(t, err)
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	bus := &printer{}
	var agent *node.Agent
	carrier, err := carry.New(carry.Config{
		Node: "node-1", File: filepath.Join(dir, "desired.json"), Engine: engine, Logger: log, Registry: local{},
		Health:  func(w string) (placement.Event, bool) { return agent.Placement(w) },
		Changed: func() { agent.ManagedChanged() },
	})
	require.NoError(t, err)
	agent, err = node.New(node.Config{Node: "node-1", StateFile: filepath.Join(dir, "agent.json"), Engine: engine, Publisher: bus, Links: bus,
		Certificates: bus, Managed: carrier, Logger: log})
	require.NoError(t, err)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()

	mux := http.NewServeMux()
	mux.HandleFunc("POST /desired", func(w http.ResponseWriter, r *http.Request) {
		var all map[string]placement.Desired
		if err := json.NewDecoder(r.Body).Decode(&all); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		carrier.SetDesired(ctx, all)
	})
	mux.HandleFunc("GET /report", func(w http.ResponseWriter, _ *http.Request) {
		if r, ok := carrier.Report(); ok {
			_ = json.NewEncoder(w).Encode(r)
		}
	})
	mux.HandleFunc("GET /capture", func(w http.ResponseWriter, r *http.Request) {
		c, err := carrier.Capture(r.Context(), r.FormValue("name"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusNotFound)
			return
		}
		_ = json.NewEncoder(w).Encode(c)
	})
	control := filepath.Join(dir, "control.sock")
	_ = os.Remove(control)
	ln, err := net.Listen("unix", control)
	require.NoError(t, err)
	go func() { _ = http.Serve(ln, mux) }()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return carrier.Run(ctx) })
	g.Go(func() error { return agent.Run(ctx) })
	require.ErrorIs(t, g.Wait(), context.Canceled)
}

// TestRegistryProcess is the registry inside of a host.
func TestRegistryProcess(t *testing.T) {
	dir := os.Getenv("CARRY_TEST_REGISTRY")
	if dir == "" {
		return // it proves nothing alone
	}
	logrus.SetOutput(io.Discard)
	conf := &configuration.Configuration{Storage: configuration.Storage{
		"filesystem":  configuration.Parameters{"rootdirectory": dir},
		"maintenance": configuration.Parameters{"uploadpurging": map[any]any{"enabled": false}},
	}}
	ln, err := net.Listen("tcp", registryAddr)
	require.NoError(t, err)
	require.NoError(t, http.Serve(ln, handlers.NewApp(context.Background(), conf)))
}

// world is a node with a real engine, an agent and a registry.
type world struct {
	*lab.Node
	t        *testing.T
	env      *lab.Env
	socket   *lab.BlockingSocket
	agent    *lab.Process
	registry *lab.Process
	control  *http.Client
	desired  map[string]placement.Desired
}

func newWorld(t *testing.T, engineArgs ...string) *world {
	env := lab.New(t)
	w := &world{t: t, env: env, Node: env.Node("node-1", engineArgs...), desired: map[string]placement.Desired{}}
	w.socket = w.BlockingSocket()
	require.NoError(t, os.MkdirAll(w.Path("agent"), 0o700))
	w.registry = w.StartEnv("registry", []string{"CARRY_TEST_REGISTRY=" + w.Path("registry")}, os.Args[0], "-test.run=^TestRegistryProcess$", "-test.timeout=10m")
	w.agent = w.StartEnv("agent", []string{socketEnv + "=" + w.socket.Address(), dirEnv + "=" + w.Path("agent")},
		os.Args[0], "-test.run=^TestAgentProcess$", "-test.timeout=10m")
	w.control = &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", w.Path("agent", "control.sock"))
		},
		DisableKeepAlives: true,
	}}
	w.awaitAgent()
	return w
}

func (w *world) awaitAgent() {
	w.t.Helper()
	w.env.Await(15*time.Second, "the agent reports", func() bool { _, ok := w.report(); return ok })
}

// want changes what is desired of a workload, with the next revision.
func (w *world) want(workload string, edit func(*placement.Desired)) placement.Desired {
	w.t.Helper()
	d := w.desired[workload]
	if d.Revision == 0 {
		d = placement.Desired{
			Workload: workload, Node: "node-1", Kind: placement.KindContainer, Generation: 1, Want: placement.WantServing,
			Container: workload, Ports: []placement.Port{{Port: 8080, Protocol: placement.ProtocolHTTP}}, DrainSeconds: 5,
		}
	}
	d.Revision++
	edit(&d)
	w.desired[workload] = d
	w.send()
	return d
}

func (w *world) send() {
	w.t.Helper()
	body, err := json.Marshal(w.desired)
	require.NoError(w.t, err)
	resp, err := w.control.Post("http://agent/desired", "application/json", bytes.NewReader(body))
	require.NoError(w.t, err)
	resp.Body.Close()
	require.Equal(w.t, http.StatusOK, resp.StatusCode)
}

func (w *world) report() (placement.NodeReport, bool) {
	var r placement.NodeReport
	resp, err := w.control.Get("http://agent/report")
	if err != nil {
		return r, false
	}
	defer resp.Body.Close()
	return r, json.NewDecoder(resp.Body).Decode(&r) == nil
}

func (w *world) observed(workload string) placement.Observed {
	r, _ := w.report()
	for _, o := range r.Placements {
		if o.Workload == workload {
			return o
		}
	}
	return placement.Observed{}
}

// await waits for what is said of a workload.
func (w *world) await(workload, what string, match func(placement.Observed) bool) placement.Observed {
	w.t.Helper()
	var last placement.Observed
	defer func() {
		if w.t.Failed() {
			w.t.Logf("last said of %s: %+v fault %+v", workload, last, last.Fault)
		}
	}()
	w.env.Await(30*time.Second, workload+" "+what, func() bool {
		last = w.observed(workload)
		return match(last)
	})
	return last
}

// done: everything of the present revision is so.
func (w *world) done(workload string) placement.Observed {
	w.t.Helper()
	revision := w.desired[workload].Revision
	return w.await(workload, "done", func(o placement.Observed) bool { return o.Done && o.Revision == revision })
}

// serving: it is done and ready.
func (w *world) serving(workload string) placement.Observed {
	w.t.Helper()
	revision := w.desired[workload].Revision
	return w.await(workload, "serving", func(o placement.Observed) bool {
		return o.Done && o.Revision == revision && o.Ready && o.Role == placement.RoleServing && o.State == placement.StateRunning
	})
}

func (w *world) capture(name string) (placement.Captured, error) {
	resp, err := w.control.Get("http://agent/capture?name=" + name)
	if err != nil {
		return placement.Captured{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return placement.Captured{}, fmt.Errorf("%w: %s", errNotCaptured, body)
	}
	var c placement.Captured
	return c, json.Unmarshal(body, &c)
}

// captured captures a container, adopts it and mirrors its image.
func (w *world) enable(workload string) placement.Captured {
	w.t.Helper()
	c, err := w.capture(workload)
	require.NoError(w.t, err)
	w.want(workload, func(d *placement.Desired) {
		d.Original, d.Adopt, d.AdoptedAt, d.Spec = true, c.ID, 1, c.Spec
		d.Mirror = &placement.Mirror{Repository: workload, Source: c.ImageID}
	})
	o := w.done(workload)
	require.NotNil(w.t, o.Mirrored)
	w.want(workload, func(d *placement.Desired) { d.Image, d.Mirror = *o.Mirrored, nil })
	return c
}

// events returns everything that was published about a workload.
func (w *world) events(workload string) []printed {
	var found []printed
	for line := range strings.Lines(w.agent.Log()) {
		var p printed
		if strings.HasPrefix(line, `{"At"`) && strings.HasSuffix(line, "\n") {
			require.NoError(w.t, json.Unmarshal([]byte(line), &p))
			if p.Event.Workload == workload {
				found = append(found, p)
			}
		}
	}
	return found
}

// containers returns the names of all containers, sorted, with what they do.
func (w *world) containers() []string {
	w.t.Helper()
	list, err := w.Docker().ContainerList(w.t.Context(), container.ListOptions{All: true})
	require.NoError(w.t, err)
	var out []string
	for _, c := range list {
		out = append(out, strings.TrimPrefix(c.Names[0], "/")+" "+c.State)
	}
	slices.Sort(out)
	return out
}

func (w *world) inspect(name string) container.InspectResponse {
	w.t.Helper()
	found, err := w.Docker().ContainerInspect(w.t.Context(), name)
	require.NoError(w.t, err)
	return found
}

// plain is a container that can be made available: no mount, no label.
func (w *world) plain(name string, edit ...func(*container.Config, *container.HostConfig)) *lab.Container {
	w.t.Helper()
	return w.RunApp(lab.App{Name: name, Env: []string{"GREETING=hello"}, Configure: func(c *container.Config, h *container.HostConfig) {
		c.Cmd, c.Hostname = []string{"serve", "--name", name}, ""
		h.Binds = nil
		for _, fn := range edit {
			fn(c, h)
		}
	}})
}
