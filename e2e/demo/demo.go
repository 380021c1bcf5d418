// Package demo runs the whole product on hosts made for it on this machine,
// under load, and shows what a fault does: first by itself, then at the word
// of whoever tries it.
package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/load"
	"github.com/opfield/availability/e2e/system"
)

const (
	webHost    = "localhost"
	workload   = "web"
	cutNode    = "node-1"
	warmUp     = 4 * time.Second
	healWithin = 60 * time.Second
	coolDown   = 3 * time.Second
	tellEvery  = 10 * time.Second
	longLoad   = 24 * time.Hour
)

// Config configures a demo.
type Config struct {
	Once   bool      // end after the first cut
	Port   uint16    // on 127.0.0.1, where the person's browser reaches nginx
	Socket string    // for the commands of the person
	Out    io.Writer // the story
}

// Demo is a running demo.
type Demo struct {
	cfg   Config
	host  *host
	env   *lab.Env
	sys   *system.System
	run   *load.Run
	start time.Time

	mu   sync.Mutex
	cuts []cut
}

// cut is one fault that may cost requests which must not be repeated.
type cut struct {
	node     string
	from, to time.Time // to is zero while it lasts
}

// errFailed says that a request failed that must not fail.
var errFailed = errors.New("requests failed that must not fail")

// Run runs the demo until ctx ends (or, with Once, until the story is told)
// and removes everything it made.
func Run(ctx context.Context, cfg Config) (err error) {
	d := &Demo{cfg: cfg, host: &host{out: cfg.Out}, start: time.Now()}
	defer func() {
		r := recover()
		if _, gaveUp := r.(giveUp); r != nil && !gaveUp {
			d.host.close()
			panic(r)
		}
		if d.host.reason != "" {
			err = errors.Join(err, errors.New(d.host.reason))
		}
		d.host.close()
		d.say("everything the demo made is removed")
	}()
	ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(cfg.Port))))
	if err != nil {
		return fmt.Errorf("--port: %w; choose a free port with --port", err)
	}
	defer ln.Close()
	d.build()
	go d.forward(ln)
	stop, err := d.listen(ctx)
	if err != nil {
		return err
	}
	defer stop()
	return d.tell(ctx)
}

// build starts every host and waits until the route serves.
func (d *Demo) build() {
	d.say("starting a controller, two relays, an ingress node with nginx and three Docker nodes, each a host of its own")
	d.env = lab.New(d.host)
	d.sys = system.Start(d.host, d.env, system.Config{Relays: 2, Nodes: 3})
	d.sys.Nodes[0].RunApp(lab.App{Workload: workload, Configure: func(c *container.Config, h *container.HostConfig) {
		c.Cmd, c.Hostname = []string{"serve", "--name", workload}, ""
		h.Binds = nil // a workload with local data cannot be made available
	}})
	d.sys.MustCLI("route", "add", workload, "--host", webHost, "--workload", workload, "--port", "8080")
	d.sys.AwaitLinks(30*time.Second, "open", link(cutNode))
	d.sys.AwaitRoute(30*time.Second, webHost)
	d.settle()
	d.say("one container, web, serves on node-1: http://localhost:%d/ok", d.cfg.Port)
}

// settle waits until nginx lists what it should.
func (d *Demo) settle() {
	d.env.Await(60*time.Second, "nginx is up to date", func() bool {
		st, err := d.sys.IngressStatus()
		return err == nil && !st.Reload.Pending
	})
}

// enable makes the container available, by the command a person would type.
func (d *Demo) enable() {
	args := []string{"ha", "enable", workload, "--mode", "replicated", "--replicas", "2", "--grace", "5s"}
	d.say("$ opfield %s", strings.Join(args, " "))
	start := time.Now()
	d.env.Await(20*time.Second, "the container is listed", func() bool { return strings.Contains(d.sys.MustCLI("workloads"), workload) })
	d.sys.MustCLI(append(args, "--no-wait")...)
	d.awaitPolicy("it serves on two nodes")
	d.say("available %.1f s later: the same container on node-1, a copy on %s, a standby with the image on the third node",
		time.Since(start).Seconds(), strings.Join(d.others(), " and "))
}

// policy is what the demo looks at of `opfield ha get`.
type policy struct {
	Health     string
	Serving    int
	Operation  *struct{ Type string }
	Placements []struct {
		Node  string
		Ready bool
	}
}

func (d *Demo) policy() policy {
	var p policy
	if out, err := d.sys.CLI("--json", "ha", "get", workload); err != nil || json.Unmarshal([]byte(out), &p) != nil {
		return policy{}
	}
	return p
}

func (d *Demo) awaitPolicy(what string) {
	d.env.Await(healWithin, what, func() bool {
		p := d.policy()
		return p.Health == "healthy" && p.Serving == 2 && p.Operation == nil
	})
}

// others are the serving nodes but the one that is going to be cut off.
func (d *Demo) others() []string {
	var out []string
	for _, p := range d.policy().Placements {
		if p.Ready && p.Node != cutNode {
			out = append(out, p.Node)
		}
	}
	return out
}

func link(node string) string { return workload + "." + node + "/8080" }

// tell is the story: load, a cut, a heal, the sum; then the person's turn.
func (d *Demo) tell(ctx context.Context) error {
	d.run = load.Start(load.Config{
		Dial: d.sys.Client().DialContext, Address: d.sys.Ingress.HostPort(system.HTTPPort), Host: webHost,
		Duration: longLoad,
		Streams: []load.Stream{
			{Name: "get-kept", Method: "GET", Path: "/ok", Rate: 50},
			{Name: "get-fresh", Method: "GET", Path: "/ok", Rate: 50, Fresh: true},
			{Name: "post-kept", Method: "POST", Path: "/ok", Rate: 5, Body: []byte("x")},
			{Name: "post-fresh", Method: "POST", Path: "/ok", Rate: 5, Fresh: true, Body: []byte("x")},
		},
	})
	d.say("steady load: 100 GET and 10 POST a second, half of them on new connections")
	d.enable()
	if !pause(ctx, warmUp) {
		return d.sum(d.run.Stop())
	}
	before := d.others()
	at, err := d.cut(cutNode)
	if err != nil {
		return err
	}
	d.watchCut(cutNode, at)
	d.env.Await(healWithin, "another node takes its place", func() bool { return len(d.others()) == 2 })
	for _, node := range d.others() {
		if !slices.Contains(before, node) {
			d.say("%s serves in its place, %.1f s after the cut: two placements again", node, time.Since(at).Seconds())
		}
	}
	if pause(ctx, coolDown) {
		if err := d.heal(cutNode); err != nil {
			return err
		}
		pause(ctx, coolDown)
	}
	if d.cfg.Once {
		return d.sum(d.run.Stop())
	}
	d.interim()
	d.say("your turn, in another shell: ./bin/opfield demo cut node-2 | heal node-2 | kill-container node-2 | stop-relay relay-1 | start-relay relay-1 | status")
	d.say("and every other command, on this controller: export OPFIELD_SOCKET=%s; ./bin/opfield ha get %s", d.sys.Socket(), workload)
	d.say("Ctrl-C ends the demo and removes everything it made")
	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return d.sum(d.run.Stop())
		case <-tick.C:
			d.interim()
		}
	}
}

// watchCut tells when each part noticed.
func (d *Demo) watchCut(node string, at time.Time) {
	var first, last time.Time
	d.env.Await(10*time.Second, "both relays drop "+node, func() bool {
		first, last = d.sys.DroppedAt(node, at)
		return !first.IsZero() && last != first
	})
	d.sayAt(first, "the first relay has dropped %s, %.2f s after the cut", node, first.Sub(at).Seconds())
	d.sayAt(last, "the second relay has dropped it, %.2f s after the cut", last.Sub(at).Seconds())
	d.env.Await(5*time.Second, "the link leaves routing", func() bool { return d.sys.LinkState(link(node)) != "open" })
	st, err := d.sys.IngressStatus()
	if err != nil {
		return
	}
	for _, l := range st.Links {
		if l.Link == link(node) {
			d.sayAt(l.Since, "the ingress node has taken it out of routing: %s (%s)", l.State, l.Reason)
		}
	}
}

// forward connects the person's port with nginx on the ingress host.
func (d *Demo) forward(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			up, err := d.sys.Ingress.DialContext(context.Background(), "tcp", d.sys.Ingress.HostPort(system.HTTPPort))
			if err != nil {
				return
			}
			defer up.Close()
			go func() {
				_, _ = io.Copy(up, c)
				if t, ok := up.(*net.TCPConn); ok {
					_ = t.CloseWrite()
				}
			}()
			_, _ = io.Copy(c, up)
		}()
	}
}

// pause waits; false: ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (d *Demo) say(format string, args ...any) { d.sayAt(time.Now(), format, args...) }

func (d *Demo) sayAt(at time.Time, format string, args ...any) {
	_, _ = fmt.Fprintf(d.cfg.Out, "%8.2f s  %s\n", at.Sub(d.start).Seconds(), fmt.Sprintf(format, args...))
}
