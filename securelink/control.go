package securelink

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// ErrSilent ends a control connection whose peer acknowledges but has not
// answered for DeadAfter.
var ErrSilent = errors.New("peer does not answer")

// ErrUnreachable ends a control connection whose peer's host has acknowledged
// nothing for UserTimeout although data was waiting for it.
var ErrUnreachable = errors.New("peer's host does not acknowledge")

// errQueue ends a control connection whose peer does not read.
var errQueue = errors.New("peer does not read: queue full")

// queueSize bounds the frames that wait for one control connection. Link
// states do not go through it: they are kept as a set of changes.
const queueSize = 256

// Control is one end of a control connection after the handshake: one reader,
// one writer, pings, and the rule for silence. Both the relay and its peers
// use it.
type Control struct {
	conn  net.Conn
	tcp   *net.TCPConn // below conn
	start time.Time

	queue   chan []byte
	notify  chan struct{}
	heard   atomic.Int64 // nanoseconds since start
	skipped atomic.Uint64
	nonce   atomic.Uint64

	mu  sync.Mutex
	err error // why the connection was given up from outside Run
}

// NewControl wraps an established control connection; tcp is what lies below
// its TLS.
func NewControl(conn net.Conn, tcp *net.TCPConn) *Control {
	return &Control{
		conn:   conn,
		tcp:    tcp,
		start:  time.Now(),
		queue:  make(chan []byte, queueSize),
		notify: make(chan struct{}, 1),
	}
}

// Send queues one encoded frame. A peer that does not read loses its session.
func (c *Control) Send(frame []byte) {
	select {
	case c.queue <- frame:
	default:
		c.Fail(errQueue)
	}
}

// Notify asks the writer to call flush soon.
func (c *Control) Notify() {
	select {
	case c.notify <- struct{}{}:
	default:
	}
}

// Fail ends the session with err; the first call wins.
func (c *Control) Fail(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.mu.Unlock()
	_ = c.conn.Close()
}

// Skipped returns the number of frames of unknown type that were skipped.
func (c *Control) Skipped() uint64 { return c.skipped.Load() }

// Handler gets every frame but pings and pongs. It reports whether it knew
// the type; an error ends the session. The body is valid during the call.
type Handler func(t FrameType, body []byte) (known bool, err error)

// Run reads and writes until the connection ends or ctx is done. flush, if
// not nil, appends the frames of everything that changed since its last call;
// it is called first at once and then after every Notify.
func (c *Control) Run(ctx context.Context, handle Handler, flush func([]byte) []byte) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = c.conn.Close() })
	defer stop()
	c.heard.Store(int64(time.Since(c.start)))

	var wg sync.WaitGroup
	var writeErr error
	wg.Go(func() {
		defer c.conn.Close()
		writeErr = c.write(ctx, flush)
	})
	readErr := c.read(handle)
	cancel()
	wg.Wait()

	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.err != nil:
		return c.err
	case writeErr != nil && !errors.Is(writeErr, context.Canceled):
		return writeErr
	default:
		return readErr
	}
}

func (c *Control) read(handle Handler) error {
	r := bufio.NewReaderSize(c.conn, 4<<10)
	var buf []byte
	for {
		t, body, err := ReadFrame(r, buf)
		if err != nil {
			return err
		}
		if cap(body) > cap(buf) {
			buf = body[:0]
		}
		c.heard.Store(int64(time.Since(c.start)))
		switch t {
		case FramePing:
			nonce, err := DecodeNumber(body)
			if err != nil {
				return err
			}
			c.Send(EncodeNumber(nil, FramePong, nonce))
		case FramePong:
			if _, err := DecodeNumber(body); err != nil {
				return err
			}
		default:
			known, err := handle(t, body)
			if err != nil {
				return fmt.Errorf("frame %d: %w", t, err)
			}
			if !known {
				c.skipped.Add(1)
			}
		}
	}
}

func (c *Control) write(ctx context.Context, flush func([]byte) []byte) error {
	tick := time.NewTicker(Tick)
	defer tick.Stop()
	var buf []byte
	var pinged time.Duration
	var waiting time.Duration // when everything sent was last seen acknowledged
	if flush != nil {
		c.Notify()
	}
	for {
		buf = buf[:0]
		select {
		case <-ctx.Done():
			return ctx.Err()
		case frame := <-c.queue:
			buf = append(buf, frame...)
			for more := true; more && len(buf) < MaxFrame; {
				select {
				case frame := <-c.queue:
					buf = append(buf, frame...)
				default:
					more = false
				}
			}
		case <-c.notify:
			if flush != nil {
				buf = flush(buf)
			}
		case <-tick.C:
			now := time.Since(c.start)
			silent := now - time.Duration(c.heard.Load())
			if silent >= DeadAfter {
				return ErrSilent
			}
			if outstanding, acked := unacknowledged(c.tcp); !outstanding {
				waiting = now
			} else if now-waiting >= UserTimeout && acked >= UserTimeout {
				return ErrUnreachable
			}
			if silent >= PingAfter && now-pinged >= PingAfter {
				pinged = now
				buf = EncodeNumber(buf, FramePing, c.nonce.Add(1))
			}
		}
		if len(buf) == 0 {
			continue
		}
		_ = c.conn.SetWriteDeadline(time.Now().Add(WriteWithin))
		if _, err := c.conn.Write(buf); err != nil {
			return err
		}
	}
}
