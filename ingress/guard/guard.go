// Package guard keeps a killed sidecar from making half an answer look whole.
//
// When a process is killed, the kernel ends its connections, and nginx takes
// that end for the normal end of an answer without a length. So a second,
// tiny process holds a duplicate of every connection of nginx: as long as it
// does, the kernel sends nothing. When the sidecar is gone, the guard writes
// bytes that are no TLS record to each of them and ends them; nginx then knows
// that the answer was cut (LNK-6).
//
// Guard is the sidecar's side, Serve the guard's. A Guard may be used by
// several goroutines at once.
package guard

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	opHold byte = 1
	opDrop byte = 2

	// A message is an operation, its id, and ids to drop beside it.
	messageSize = 9
	dropSize    = 8
	dropsMost   = 64
	// dropWithin is how long a drop may wait for a message to go with: every
	// message wakes the guard process.
	dropWithin = 20 * time.Millisecond
	sendWithin = time.Second
	respawn    = 200 * time.Millisecond
)

// Config configures a Guard.
type Config struct {
	// Command starts the guard process; it must call Serve(3).
	Command []string
	Logger  *slog.Logger
}

// Guard starts the guard process and tells it what to hold.
type Guard struct {
	cfg Config

	mu   sync.Mutex
	next uint64
	held map[uint64]*net.TCPConn
	sock *net.UnixConn // nil while there is no guard process
	proc *os.Process
	drop []uint64 // released, but not yet told
}

// New returns a Guard that holds nothing until Run.
func New(cfg Config) *Guard {
	return &Guard{cfg: cfg, held: map[uint64]*net.TCPConn{}}
}

// Run keeps a guard process until ctx is done.
func (g *Guard) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := g.run(ctx); err != nil && ctx.Err() == nil {
			g.cfg.Logger.Warn("guard process ended, starting another", "err", err)
		}
		t := time.NewTimer(respawn)
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		t.Stop()
	}
	return nil
}

func (g *Guard) run(ctx context.Context) error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make socket pair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "guard"), os.NewFile(uintptr(pair[1]), "guard")
	defer theirs.Close()
	c, err := net.FileConn(ours)
	_ = ours.Close()
	if err != nil {
		return err
	}
	sock := c.(*net.UnixConn)
	defer sock.Close()
	cmd := exec.Command(g.cfg.Command[0], g.cfg.Command[1:]...)
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	// Out of our process group: a signal for us is not one for the guard.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start guard process: %w", err)
	}
	_ = theirs.Close()
	g.attach(sock, cmd.Process)
	defer g.attach(nil, nil)
	gone := make(chan error, 1)
	go func() { gone <- cmd.Wait() }()
	select {
	case err := <-gone:
		return fmt.Errorf("guard process: %w", err)
	case <-ctx.Done():
		_ = sock.Close() // it ends when it holds nothing more
		return <-gone
	}
}

// attach makes sock the way to the guard and tells it everything held.
func (g *Guard) attach(sock *net.UnixConn, proc *os.Process) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sock, g.proc, g.drop = sock, proc, nil
	for id, c := range g.held {
		g.sendLocked(opHold, id, c)
	}
}

// Hold has the guard hold a connection until release is called. The caller
// must end the connection with CloseWrite before release: closing it alone
// sends nothing while the guard holds it.
func (g *Guard) Hold(c *net.TCPConn) (release func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.next++
	id := g.next
	g.held[id] = c
	g.sendLocked(opHold, id, c)
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.held, id)
		g.drop = append(g.drop, id)
		switch len(g.drop) {
		case 1:
			time.AfterFunc(dropWithin, g.flush)
		case dropsMost:
			g.flushLocked()
		}
	}
}

// flush tells of drops that found no message to go with.
func (g *Guard) flush() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.drop) > 0 {
		g.flushLocked()
	}
}

func (g *Guard) flushLocked() {
	id := g.drop[0]
	g.drop = g.drop[1:]
	g.sendLocked(opDrop, id, nil)
}

func (g *Guard) sendLocked(op byte, id uint64, c *net.TCPConn) {
	drop := g.drop
	g.drop = nil
	if g.sock == nil {
		return
	}
	msg := binary.BigEndian.AppendUint64(append(make([]byte, 0, messageSize+dropSize*len(drop)), op), id)
	for _, d := range drop {
		msg = binary.BigEndian.AppendUint64(msg, d)
	}
	_ = g.sock.SetWriteDeadline(time.Now().Add(sendWithin))
	var err error
	if c == nil {
		_, err = g.sock.Write(msg)
	} else {
		var raw syscall.RawConn
		if raw, err = c.SyscallConn(); err == nil {
			ctlErr := raw.Control(func(fd uintptr) {
				_, _, err = g.sock.WriteMsgUnix(msg, unix.UnixRights(int(fd)), nil)
			})
			if ctlErr != nil {
				return // the connection has been closed: nothing to hold
			}
		}
	}
	if err != nil {
		// A guard that is stuck is replaced; the next one gets everything.
		// It must not see the socket end first: to it, that is our death.
		_ = g.proc.Kill()
		g.sock = nil
	}
}
