package apply

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opfield/availability/ingress/render"
)

// Timing of the proof.
const (
	proveEvery   = 20 * time.Millisecond
	statusAnswer = time.Second // bounds one answer of the status socket
)

// StatusSocket is the name of the status socket in SocketDir.
const StatusSocket = "status.sock"

// Applier drives one nginx.
type Applier struct {
	config Config
	client *http.Client
}

// New checks the configuration; nothing is started.
func New(c Config) (*Applier, error) {
	if c.ProveWithin == 0 {
		c.ProveWithin = DefaultProveWithin
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	socket := filepath.Join(c.SocketDir, StatusSocket)
	return &Applier{config: c, client: &http.Client{
		Timeout: statusAnswer,
		Transport: &http.Transport{
			// An old worker must not answer for the new one.
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "unix", socket)
			},
		},
	}}, nil
}

// Running returns the generation that nginx serves, or "".
func (a *Applier) Running(ctx context.Context) string {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://status/generation", nil)
	if err != nil {
		return ""
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1024))
	if err != nil || resp.StatusCode != http.StatusOK {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// Alive reports whether the nginx master runs.
func (a *Applier) Alive() bool {
	proc, err := a.config.master()
	if err != nil {
		return false
	}
	_ = proc.Close()
	return true
}

// Current returns the ID of the generation on disk, or "".
func (a *Applier) Current() string { return a.config.current() }

// ReadCurrent reads a file of the current generation's folder.
func (a *Applier) ReadCurrent(name string) ([]byte, error) {
	return os.ReadFile(filepath.Join(a.config.Dir, currentLink, name))
}

// Test has nginx check a generation without touching the current one. In
// include mode only Apply can check, because the user's main file names the
// current generation.
func (a *Applier) Test(ctx context.Context, g render.Generation) error {
	if a.config.Include {
		return a.testIncluded(ctx, g)
	}
	dir, err := a.config.write(g)
	if err != nil {
		return err
	}
	return a.config.test(ctx, filepath.Join(dir, render.MainFile))
}

// testIncluded swaps the generation in for the length of `nginx -t`.
func (a *Applier) testIncluded(ctx context.Context, g render.Generation) error {
	c := a.config
	before := c.current()
	if _, err := c.write(g); err != nil {
		return err
	}
	if err := c.swap(g.ID); err != nil {
		return err
	}
	return errors.Join(c.test(ctx, c.MainFile), c.swap(before))
}

// Serves reports whether nginx runs with this generation, and would again
// after a start.
func (a *Applier) Serves(ctx context.Context, id string) bool {
	return a.Alive() && a.Current() == id && a.Running(ctx) == id
}

// Apply makes nginx serve a generation that passed Test, and proves it. If
// nginx serves it already, nothing happens: false is returned. After an error
// the previous generation is the current one again.
func (a *Applier) Apply(ctx context.Context, g render.Generation) (bool, error) {
	c := a.config
	if a.Serves(ctx, g.ID) {
		return false, nil
	}
	alive := a.Alive()
	before := c.current()
	if _, err := c.write(g); err != nil {
		return false, err
	}
	if err := c.swap(g.ID); err != nil {
		return false, err
	}
	err := a.activate(ctx, g.ID, alive)
	if err == nil {
		return true, c.prune()
	}
	if before == g.ID {
		return true, err
	}
	if swapErr := c.swap(before); swapErr != nil {
		return true, errors.Join(err, swapErr)
	}
	// A refused reload leaves nginx as it was. After any other failure it may
	// have taken the new generation, or take it later: bring it back.
	if !errors.Is(err, ErrRefused) && before != "" && a.Alive() {
		if backErr := a.activate(ctx, before, true); backErr != nil {
			return true, errors.Join(err, fmt.Errorf("restore generation %s: %w", before, backErr))
		}
	}
	return true, err
}

// activate starts or reloads nginx and waits for the proof.
func (a *Applier) activate(ctx context.Context, id string, alive bool) error {
	c := a.config
	from := logSize(c.errorLog())
	switch {
	case alive:
		if err := c.reload(ctx); err != nil {
			return err
		}
	case c.Include:
		return ErrNotRunning
	default:
		if err := c.start(ctx); err != nil {
			return err
		}
	}
	return a.prove(ctx, id, from)
}

// prove waits for the status socket. The exit code of a reload proves
// nothing; the error log says why nginx went on with the old configuration.
func (a *Applier) prove(ctx context.Context, id string, logFrom int64) error {
	ctx, cancel := context.WithTimeout(ctx, a.config.ProveWithin)
	defer cancel()
	tick := time.NewTicker(proveEvery)
	defer tick.Stop()
	for {
		if a.Running(ctx) == id {
			return nil
		}
		line, final := reloadRefusal(a.config.errorLog(), logFrom)
		if final {
			return newRefusal(line)
		}
		select {
		case <-ctx.Done():
			if line != "" {
				return newRefusal(line)
			}
			return fmt.Errorf("%w within %s", ErrNotProven, a.config.ProveWithin)
		case <-tick.C:
		}
	}
}

func logSize(name string) int64 {
	info, err := os.Stat(name)
	if err != nil {
		return 0
	}
	return info.Size()
}

// reloadRefusal returns the [emerg] line that nginx wrote since, and whether
// nginx has given up: it tries to bind a taken port for 2.5 s.
func reloadRefusal(name string, from int64) (line string, final bool) {
	if name == "" {
		return "", false
	}
	f, err := os.Open(name)
	if err != nil {
		return "", false
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() < from {
		from = 0 // rotated
	}
	text, err := io.ReadAll(io.NewSectionReader(f, from, 1<<20))
	if err != nil {
		return "", false
	}
	found := emergPattern.Find(text)
	if found == nil {
		return "", false
	}
	final = !bytes.Contains(found, []byte("bind()")) || bytes.Contains(text, []byte("still could not bind()"))
	return refusalLine(found), final
}

// Stop lets our own nginx finish its requests and end.
func (a *Applier) Stop(ctx context.Context) error {
	if a.config.Include {
		return nil
	}
	proc, err := a.config.master()
	if errors.Is(err, ErrNotRunning) {
		return nil
	}
	if err != nil {
		return err
	}
	defer proc.Close()
	if err := unix.PidfdSendSignal(int(proc.Fd()), unix.SIGQUIT, nil, 0); err != nil {
		return fmt.Errorf("stop nginx: %w", err)
	}
	tick := time.NewTicker(proveEvery)
	defer tick.Stop()
	for a.Alive() {
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), a.config.signal(unix.SIGTERM))
		case <-tick.C:
		}
	}
	return nil
}
