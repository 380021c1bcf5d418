package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"
)

const (
	// readyWithin bounds the start of a successor.
	readyWithin = 30 * time.Second

	// The successor finds the listeners of its predecessor from descriptor 4
	// on, their number in this variable, and reports on descriptor 3.
	handoverEnv  = "OPFIELD_HANDOVER"
	readyFD      = 3
	firstFD      = 4
	maxListeners = 16
)

// Handover passes listening sockets to a successor: on SIGHUP the program
// starts its own (maybe newer) binary, which takes them over; the old process
// then finishes what runs. Several old processes may be finishing at once.
type Handover struct {
	pidFile   string
	inherited []net.Listener // not asked for yet, in the predecessor's order
	ready     *os.File       // where we report to a predecessor; nil without one

	mu        sync.Mutex
	listeners []net.Listener
}

// NewHandover returns a Handover; pidFile, if not empty, always holds the
// process id of the newest process.
func NewHandover(pidFile string) (*Handover, error) {
	h := &Handover{pidFile: pidFile}
	n := os.Getenv(handoverEnv)
	if n == "" {
		return h, nil
	}
	_ = os.Unsetenv(handoverEnv)
	count, err := strconv.Atoi(n)
	if err != nil || count < 0 || count > maxListeners {
		return nil, fmt.Errorf("handover: %s=%q is not what a predecessor says", handoverEnv, n)
	}
	for i := range count {
		f := os.NewFile(uintptr(firstFD+i), "listener")
		ln, err := net.FileListener(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, fmt.Errorf("handover: take over listener %d: %w", i, err)
		}
		h.inherited = append(h.inherited, ln)
	}
	h.ready = os.NewFile(readyFD, "ready")
	syscall.CloseOnExec(readyFD)
	return h, nil
}

// Listen returns the predecessor's listener, or what open opens. Programs
// call it in the same order always.
func (h *Handover) Listen(open func() (net.Listener, error)) (net.Listener, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var ln net.Listener
	if len(h.inherited) > 0 {
		ln, h.inherited = h.inherited[0], h.inherited[1:]
	} else {
		var err error
		if ln, err = open(); err != nil {
			return nil, err
		}
	}
	h.listeners = append(h.listeners, ln)
	return ln, nil
}

// Run tells the predecessor to let go, then waits until a successor has taken
// over or ctx is done. It reports whether there is a successor.
func (h *Handover) Run(ctx context.Context, log *slog.Logger) (succeeded bool, err error) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	if h.pidFile != "" {
		if err := WriteFile(h.pidFile, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644); err != nil {
			return false, fmt.Errorf("--pid-file: %w", err)
		}
	}
	if h.ready != nil {
		_, err := h.ready.Write([]byte{1})
		if err = errors.Join(err, h.ready.Close()); err != nil {
			return false, fmt.Errorf("handover: tell the predecessor: %w", err)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return false, nil
		case <-hup:
			if err := h.replace(ctx); err != nil {
				log.Error("restart failed, going on as before", "err", err)
				continue
			}
			return true, nil
		}
	}
}

// replace starts a successor and waits until it is ready.
func (h *Handover) replace(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{w}
	h.mu.Lock()
	for _, ln := range h.listeners {
		f, fileErr := ln.(interface{ File() (*os.File, error) }).File()
		if fileErr != nil {
			err = errors.Join(err, fileErr)
			continue
		}
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	cmd.Env = append(os.Environ(), handoverEnv+"="+strconv.Itoa(len(h.listeners)))
	h.mu.Unlock()
	if err == nil {
		err = cmd.Start()
	}
	for _, f := range cmd.ExtraFiles {
		_ = f.Close() // the successor has its own by now
	}
	if err != nil {
		return fmt.Errorf("start successor: %w", err)
	}
	go func() { _ = cmd.Wait() }() // it outlives us, or has failed already
	_ = r.SetReadDeadline(time.Now().Add(readyWithin))
	stop := context.AfterFunc(ctx, func() { _ = r.SetReadDeadline(time.Now()) })
	defer stop()
	if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
		_ = cmd.Process.Kill()
		return fmt.Errorf("successor did not get ready: %w", err)
	}
	return nil
}
