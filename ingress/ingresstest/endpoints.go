package ingresstest

import (
	"context"
	"errors"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// Endpoints is a minimal stand-in for the link endpoints: it dials placements
// directly instead of through a relay, and follows the orders.
type Endpoints struct {
	Port uint16

	mu     sync.Mutex
	orders map[netip.Addr]upstream.Order
	addr   map[placement.LinkID]netip.Addr
	target map[placement.LinkID]string
	conns  map[net.Conn]placement.LinkID
}

// NewEndpoints listens on every loopback address, on a free port.
func NewEndpoints(t testing.TB) *Endpoints {
	t.Helper()
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), "lo") }), err)
	}}
	ln, err := config.Listen(context.Background(), "tcp4", "0.0.0.0:0")
	require.NoError(t, err)
	e := &Endpoints{
		Port:   uint16(ln.Addr().(*net.TCPAddr).Port),
		orders: map[netip.Addr]upstream.Order{}, addr: map[placement.LinkID]netip.Addr{},
		target: map[placement.LinkID]string{}, conns: map[net.Conn]placement.LinkID{},
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { e.serve(c.(*net.TCPConn)) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		e.cut(func(placement.LinkID) bool { return true })
		wg.Wait()
	})
	return e
}

// Lead says where the placement behind a link listens.
func (e *Endpoints) Lead(id placement.LinkID, p *Placement) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.target[id] = p.Address
}

// Apply implements ingress.Endpoints. Streams of links that are no longer
// open end, idle or not.
func (e *Endpoints) Apply(orders []upstream.Order, addr func(placement.LinkID) netip.Addr) {
	e.mu.Lock()
	for _, o := range orders {
		e.addr[o.Link] = addr(o.Link)
	}
	e.mu.Unlock()
	e.Update(orders)
}

// Update implements ingress.Endpoints.
func (e *Endpoints) Update(orders []upstream.Order) {
	closed := map[placement.LinkID]bool{}
	e.mu.Lock()
	for _, o := range orders {
		a := e.addr[o.Link]
		if old, ok := e.orders[a]; ok && old.Link == o.Link && old.State == o.State && slices.Equal(old.Open, o.Open) {
			continue
		}
		e.orders[a] = o
		closed[o.Link] = o.State != upstream.Open
	}
	e.mu.Unlock()
	if len(closed) > 0 {
		e.cut(func(id placement.LinkID) bool { return closed[id] })
	}
}

// State returns the state of a link.
func (e *Endpoints) State(id placement.LinkID) upstream.State {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.orders[e.addr[id]].State
}

// Address returns the address of a link.
func (e *Endpoints) Address(id placement.LinkID) netip.Addr {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.addr[id]
}

func (e *Endpoints) cut(which func(placement.LinkID) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for c, id := range e.conns {
		if which(id) {
			_ = c.Close()
		}
	}
}

// choose returns the link that a connection to addr leads to.
func (e *Endpoints) choose(addr netip.Addr) (placement.LinkID, string, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	o, ok := e.orders[addr]
	if !ok {
		return placement.LinkID{}, "", false
	}
	id := o.Link
	switch {
	case o.State == upstream.Open:
	case o.State == upstream.Joined && len(o.Open) > 0:
		id = o.Open[rand.IntN(len(o.Open))]
	default:
		return placement.LinkID{}, "", false
	}
	return id, e.target[id], e.target[id] != ""
}

func (e *Endpoints) serve(c *net.TCPConn) {
	defer c.Close()
	local := c.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	id, target, ok := e.choose(local)
	if !ok {
		_ = c.SetLinger(0)
		return
	}
	up, err := net.DialTimeout("tcp", target, 2*time.Second)
	if err != nil {
		_ = c.SetLinger(0)
		return
	}
	defer up.Close()
	e.mu.Lock()
	e.conns[c] = id
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		delete(e.conns, c)
		e.mu.Unlock()
	}()
	var wg sync.WaitGroup
	wg.Go(func() { pipe(up.(*net.TCPConn), c) })
	pipe(c, up.(*net.TCPConn))
	wg.Wait()
}

func pipe(dst, src *net.TCPConn) {
	_, err := io.Copy(dst, src)
	if err != nil {
		_ = dst.Close()
		return
	}
	_ = dst.CloseWrite()
}

func discard() *log.Logger { return log.New(io.Discard, "", 0) }

// FreePort returns a port that was free a moment ago.
func FreePort(t testing.TB) uint16 {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	_, text, err := net.SplitHostPort(ln.Addr().String())
	require.NoError(t, err)
	n, err := strconv.ParseUint(text, 10, 16)
	require.NoError(t, err)
	return uint16(n)
}
