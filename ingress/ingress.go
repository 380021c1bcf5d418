package ingress

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/ingress/apply"
	"github.com/opfield/availability/ingress/render"
)

// Timing of the loop.
const (
	aliveEvery = 500 * time.Millisecond // our own nginx is looked after
	saveEvery  = 5 * time.Second
	// forgetAfter is longer than NATS keeps the last event of a removed
	// placement (24 h).
	forgetAfter = 25 * time.Hour
	showEvery   = 80 * time.Millisecond // status follows a change within this
)

// Ingress is the sidecar of one ingress node.
type Ingress struct {
	config  Config
	inbox   *Inbox
	board   *board
	metrics *metrics
	applier *apply.Applier
}

// New checks the configuration; nothing is started or written.
func New(c Config) (*Ingress, error) {
	if c.ProbeEvery == 0 {
		c.ProbeEvery = DefaultProbeEvery
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c.Apply.Include = c.Render.Include
	c.Apply.RunDir, c.Apply.LogDir, c.Apply.SocketDir = c.Render.RunDir, c.Render.LogDir, c.Render.SocketDir
	if _, err := render.New(c.Render); err != nil {
		return nil, err
	}
	a, err := apply.New(c.Apply)
	if err != nil {
		return nil, err
	}
	m, err := newMetrics(c.Registerer)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return &Ingress{config: c, inbox: newInbox(), board: &board{}, metrics: m, applier: a}, nil
}

// Inbox returns where relay sessions report to.
func (in *Ingress) Inbox() *Inbox { return in.inbox }

// Status returns the present status.
func (in *Ingress) Status() Status { return in.board.get() }

// StopNginx lets our own nginx end. It is called after Run, and only when no
// other sidecar takes over.
func (in *Ingress) StopNginx(ctx context.Context) error { return in.applier.Stop(ctx) }

// Run works until ctx ends. nginx keeps running.
func (in *Ingress) Run(ctx context.Context) error {
	defer close(in.inbox.done)
	if err := in.folders(); err != nil {
		return err
	}
	l, err := newLoop(in.config, in.metrics, in.board)
	if err != nil {
		return fmt.Errorf("last state: %w", err)
	}
	watch, err := newWatcher()
	if err != nil {
		return err
	}
	l.restore()
	r := &runner{loop: l, inbox: in.inbox, applier: in.applier, kick: make(chan struct{}, 1), saves: make(chan state, 1)}
	r.paths = l.watchedPaths()
	w := &worker{config: in.config, applier: in.applier, refused: map[string]refusal{}}

	g, ctx := errgroup.WithContext(ctx)
	src := in.config.Source
	g.Go(func() error { return src.FollowPlacements(ctx, in.inbox.Event) })
	g.Go(func() error { return src.FollowNodes(ctx, in.inbox.Node) })
	g.Go(func() error { return src.FollowBucket(ctx, BucketRoutes, in.inbox.Routes) })
	g.Go(func() error { return src.FollowBucket(ctx, BucketCertificates, in.inbox.Certificates) })
	g.Go(func() error { return src.FollowBucket(ctx, BucketRelays, in.inbox.Relays) })
	g.Go(func() error { return src.FollowBucket(ctx, BucketMembers, in.inbox.Members) })
	results := make(chan result, 1)
	g.Go(func() error { return w.run(ctx, l.jobs, func(r result) { results <- r }) })
	g.Go(func() error { return watch.run(ctx, r.watched, r.kick, func() { in.inbox.put((*loop).filesChanged) }) })
	if p := in.config.Prober; p != nil && in.config.ProbeEvery > 0 {
		g.Go(func() error { return r.probe(ctx, p, in.config.ProbeEvery) })
	}
	g.Go(r.save)
	g.Go(func() error { return r.run(ctx, results) })
	if err := g.Wait(); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

// folders makes what the sidecar and nginx write to. Only root and the nginx
// workers reach the sockets: whoever does speaks to placements through them.
func (in *Ingress) folders() error {
	c := in.config.Render
	for _, d := range []struct {
		path   string
		mode   os.FileMode
		worker bool
	}{
		{in.config.StateDir, 0o711, false}, // the workers pass through it to CertDir
		{in.config.Apply.Dir, 0o755, false},
		{c.LogDir, 0o755, false},
		{c.CertDir, 0o700, true},
		{c.SocketDir, 0o700, true},
		{filepath.Join(c.RunDir, "tmp"), 0o755, false},
	} {
		if d.path == "tmp" {
			continue // include mode without a RunDir
		}
		if err := os.MkdirAll(filepath.Dir(d.path), 0o755); err != nil {
			return fmt.Errorf("make folder: %w", err)
		}
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return fmt.Errorf("make folder: %w", err)
		}
		if d.path == in.config.StateDir && in.config.WorkerUID >= 0 {
			// Whoever made it: the workers must get through to CertDir.
			info, err := os.Stat(d.path)
			if err != nil {
				return fmt.Errorf("make folder: %w", err)
			}
			if err := os.Chmod(d.path, info.Mode().Perm()|0o011); err != nil {
				return fmt.Errorf("make folder: %w", err)
			}
		}
		if d.worker {
			if err := os.Chmod(d.path, d.mode); err != nil {
				return fmt.Errorf("make folder: %w", err)
			}
			if in.config.WorkerUID >= 0 {
				if err := os.Chown(d.path, in.config.WorkerUID, -1); err != nil {
					return fmt.Errorf("make folder: %w", err)
				}
			}
		}
	}
	return nil
}
