package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/opfield/availability/e2e/system"
)

// cut takes a node off the network.
func (d *Demo) cut(node string) (time.Time, error) {
	n, err := d.node(node)
	if err != nil {
		return time.Time{}, err
	}
	if d.isCut(node) {
		return time.Time{}, fmt.Errorf("%s is cut off already; opfield demo heal %s brings it back", node, node)
	}
	at := time.Now()
	n.Cut()
	d.mu.Lock()
	d.cuts = append(d.cuts, cut{node: node, from: at})
	d.mu.Unlock()
	d.sayAt(at, "%s is cut off: no packet leaves or reaches it any more, and nobody is told", node)
	return at, nil
}

func (d *Demo) heal(node string) error {
	n, err := d.node(node)
	if err != nil {
		return err
	}
	if !d.isCut(node) {
		return fmt.Errorf("%s is not cut off; opfield demo cut %s does that", node, node)
	}
	n.Heal()
	d.say("%s is back on the network", node)
	d.over(node)
	d.env.Await(healWithin, "what it ran is reconciled", func() bool {
		p := d.policy()
		running := slices.ContainsFunc(n.Containers(), func(c container.Summary) bool {
			return c.Labels["opfield.workload"] == workload && c.State == container.StateRunning
		})
		return p.Operation == nil && p.Serving == 2 && running == (d.sys.LinkState(link(node)) == "open")
	})
	if d.sys.LinkState(link(node)) == "open" {
		d.say("it serves again")
	} else {
		d.say("its old copy is stopped and takes no traffic")
	}
	return nil
}

func (d *Demo) isCut(node string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.ContainsFunc(d.cuts, func(c cut) bool { return c.node == node && c.to.IsZero() })
}

func (d *Demo) over(node string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.cuts {
		if d.cuts[i].node == node && d.cuts[i].to.IsZero() {
			d.cuts[i].to = time.Now()
		}
	}
}

func (d *Demo) killContainer(node string) error {
	if _, err := d.node(node); err != nil {
		return err
	}
	at := time.Now()
	d.mu.Lock()
	d.cuts = append(d.cuts, cut{node: node, from: at, to: at.Add(time.Second)})
	d.mu.Unlock()
	if err := d.signal(node, "KILL"); err != nil {
		return err
	}
	d.sayAt(at, "the container on %s is killed", node)
	d.env.Await(healWithin, "it serves again", func() bool { return d.sys.LinkState(link(node)) == "open" })
	d.say("its node has started it again, %.1f s later", time.Since(at).Seconds())
	return nil
}

// signal signals the workload's container on a node.
func (d *Demo) signal(node, signal string) error {
	n, err := d.node(node)
	if err != nil {
		return err
	}
	for _, c := range n.Containers() {
		if c.Labels["opfield.workload"] == workload && c.State == container.StateRunning {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			return n.Docker().ContainerKill(ctx, c.ID, signal)
		}
	}
	return fmt.Errorf("no container of %s runs on %s", workload, node)
}

func (d *Demo) stopRelay(id string) error {
	r, err := d.relay(id)
	if err != nil {
		return err
	}
	if !r.Process.Running() {
		return fmt.Errorf("%s is stopped already; opfield demo start-relay %s starts it", id, id)
	}
	d.say("%s is being stopped", id)
	r.Process.Stop(10 * time.Second)
	d.say("%s has stopped", id)
	return nil
}

func (d *Demo) startRelay(id string) error {
	r, err := d.relay(id)
	if err != nil {
		return err
	}
	if r.Process.Running() {
		return fmt.Errorf("%s runs already", id)
	}
	r.Process.Start()
	d.say("%s is started", id)
	return nil
}

// usual returns what a verb means without a target.
func (d *Demo) usual(verb string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch verb {
	case "stop-relay":
		return "relay-1"
	case "start-relay":
		for _, r := range d.sys.Relays {
			if !r.Process.Running() {
				return r.ID
			}
		}
		return "relay-1"
	case "heal":
		for _, c := range d.cuts {
			if c.to.IsZero() {
				return c.node
			}
		}
	}
	return cutNode
}

func (d *Demo) node(id string) (*system.Node, error) {
	for _, n := range d.sys.Nodes {
		if n.ID == id {
			return n, nil
		}
	}
	return nil, fmt.Errorf("no node %q: the demo has node-1, node-2 and node-3", id)
}

func (d *Demo) relay(id string) (*system.Member, error) {
	for _, r := range d.sys.Relays {
		if r.ID == id {
			return r, nil
		}
	}
	return nil, fmt.Errorf("no relay %q: the demo has relay-1 and relay-2", id)
}

// listen takes the person's commands on the socket.
func (d *Demo) listen(ctx context.Context) (stop func(), err error) {
	if err := os.MkdirAll(filepath.Dir(d.cfg.Socket), 0o755); err != nil {
		return nil, err
	}
	if c, err := net.Dial("unix", d.cfg.Socket); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("a demo runs already (%s answers)", d.cfg.Socket)
	}
	_ = os.Remove(d.cfg.Socket) // of a demo that was killed
	ln, err := net.Listen("unix", d.cfg.Socket)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(d.cfg.Socket, 0o600); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	mux := http.NewServeMux()
	for name, verb := range map[string]func(string) error{
		"cut":            func(n string) error { return d.cutAndWatch(n) },
		"heal":           d.heal,
		"kill-container": d.killContainer,
		"stop-relay":     d.stopRelay,
		"start-relay":    d.startRelay,
	} {
		mux.HandleFunc("POST /"+name, func(w http.ResponseWriter, r *http.Request) {
			target := r.URL.Query().Get("target")
			if target == "" {
				target = d.usual(name)
			}
			if err := d.attempt(func() error { return verb(target) }); err != nil {
				http.Error(w, err.Error(), http.StatusConflict)
			}
		})
	}
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		out, err := d.sys.CLI("status")
		if err != nil {
			http.Error(w, err.Error()+"\n"+out, http.StatusConflict)
			return
		}
		_, _ = fmt.Fprint(w, out)
	})
	srv := &http.Server{Handler: mux, ReadTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
	go func() { _ = srv.Serve(ln) }()
	return func() { _ = srv.Close() }, nil
}

// attempt does what the person asked for. What does not come about in time,
// because of what they did before, is told and does not end the demo.
func (d *Demo) attempt(f func() error) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case giveUp:
			err = errors.New(d.host.forgive())
		default:
			panic(r)
		}
	}()
	return f()
}

func (d *Demo) cutAndWatch(node string) error {
	at, err := d.cut(node)
	if err != nil {
		return err
	}
	go func() {
		// The story goes on without this part.
		_ = d.attempt(func() error { d.watchCut(node, at); return nil })
	}()
	return nil
}
