package securelink

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Early bytes keep a distance: those that a client reads together with an
// answer do not end its connection, and there are only three until the next.
const (
	nudgeAgain = 3 * time.Millisecond   // by then a client has put the connection into its pool
	nudgeLast  = 100 * time.Millisecond // a busy one too
)

// tlsRecordType is the first byte of every TLS 1.3 record after the handshake;
// the version behind it is constant too (RFC 8446 section 5.2).
const tlsRecordType = 0x17

// corkRoom is what a small answer and the close_notify behind it need.
const corkRoom = 1 << 10

// recordStart is how every record begins whatever is in it: the bytes that can
// be sent before the record is known.
const recordStart = "\x17\x03\x03"

// Nudger wraps the connection under a TLS 1.3 server. Nudge sends the first
// byte of the next record early. A client that keeps the connection idle in a
// pool sees it readable and drops it; one that waits for an answer just waits
// for the rest of the record. So idle connections end without a race, and
// requests under way lose nothing (measured with nginx 1.22). A client that is
// just reading an answer may swallow the byte with it and then keep the
// connection, so the second constant byte follows a moment after every answer,
// and repeated nudges send the second and the third.
//
// It relies on crypto/tls passing whole records to Write, which it does.
type Nudger struct {
	*net.TCPConn

	// First are bytes of the stream that were received already; Read gives
	// them first. Owned by the reader.
	First []byte

	reader *rawReader // owned by the reader

	draining atomic.Bool

	mu     sync.Mutex
	writer *rawWriter
	corked []byte      // records that wait for Uncork; nil: none do
	ready  bool        // the handshake is over: records begin with tlsRecordType
	early  int         // bytes of the next record that are on the wire already
	sent   time.Time   // when the last of them was
	again  *time.Timer // nudges once more after a write; nil before the first
	err    error
}

// Read implements net.Conn.
func (n *Nudger) Read(b []byte) (int, error) {
	if len(n.First) > 0 {
		m := copy(b, n.First)
		n.First = n.First[m:]
		return m, nil
	}
	if n.reader == nil {
		raw, err := n.TCPConn.SyscallConn()
		if err != nil {
			return 0, err
		}
		n.reader = newRawReader(raw)
	}
	return n.reader.read(b)
}

func (n *Nudger) sendLocked(b []byte) error {
	if n.writer == nil {
		raw, err := n.TCPConn.SyscallConn()
		if err != nil {
			return err
		}
		n.writer = newRawWriter(raw)
	}
	return n.writer.write(b)
}

// Ready tells the Nudger that the handshake is over. If a nudge was asked for
// before, it happens now.
func (n *Nudger) Ready() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ready = true
	if n.draining.Load() {
		n.sendEarlyLocked()
	}
}

// Nudge ends the connection as soon as its user has no request under way: it
// sends an early byte now and one behind every record that follows. It never
// blocks; where the send buffer is full, nothing is sent, so a caller that
// drains repeats it.
func (n *Nudger) Nudge() {
	n.draining.Store(true)
	// If the lock is taken, a Write is under way; it looks at draining last.
	if n.mu.TryLock() {
		n.sendEarlyLocked()
		n.mu.Unlock()
	}
}

// Draining reports whether the connection was asked to end.
func (n *Nudger) Draining() bool { return n.draining.Load() }

func (n *Nudger) sendEarlyLocked() {
	if n.err != nil || !n.ready {
		return
	}
	now := time.Now()
	switch passed := now.Sub(n.sent); {
	case n.early == 1 && passed < nudgeAgain, n.early == 2 && passed < nudgeLast:
		return
	}
	n.sent = now
	n.early, n.err = sendEarly(n.TCPConn, n.early)
}

// sendEarly sends the byte of a record's start that follows the given number,
// if there is one and if that is possible at once. It returns the new number.
func sendEarly(c *net.TCPConn, early int) (int, error) {
	if early == len(recordStart) {
		return early, nil
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return early, err
	}
	var count int
	var sendErr error
	err = raw.Control(func(fd uintptr) {
		count, sendErr = ignoringEINTR(func() (int, error) { return unix.Write(int(fd), []byte{recordStart[early]}) })
	})
	if errors.Is(sendErr, unix.EAGAIN) {
		return early, err
	}
	return early + max(count, 0), errors.Join(err, sendErr)
}

// Cork keeps records back until Uncork writes them all at once.
func (n *Nudger) Cork() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.corked = make([]byte, 0, corkRoom)
}

// Uncork writes what Cork kept back, however long the peer takes: the deadline
// that crypto/tls leaves behind its close_notify is lifted.
func (n *Nudger) Uncork() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.corked
	n.corked = nil
	if len(b) == 0 {
		return n.err
	}
	if err := n.SetWriteDeadline(time.Time{}); err != nil {
		return err
	}
	_, err := n.writeLocked(b)
	return err
}

// Write writes one or more whole TLS records.
func (n *Nudger) Write(b []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.corked != nil {
		n.corked = append(n.corked, b...)
		return len(b), nil
	}
	return n.writeLocked(b)
}

func (n *Nudger) writeLocked(b []byte) (int, error) {
	if n.err != nil {
		return 0, n.err
	}
	if !n.ready || len(b) == 0 || (n.early == 0 && !n.draining.Load()) {
		if n.err = n.sendLocked(b); n.err != nil {
			return 0, n.err
		}
		if n.draining.Load() {
			n.sendEarlyLocked()
		}
		return len(b), nil
	}
	// What is out already is left off, and the next record's first byte is
	// added in the same write: the peer most often sees it at once.
	want := len(b)
	b = b[n.early:]
	out := make([]byte, 0, len(b)+1)
	out = append(append(out, b...), tlsRecordType)
	if n.err = n.sendLocked(out); n.err != nil {
		return 0, n.err
	}
	n.early, n.sent = 1, time.Now()
	if n.again == nil {
		n.again = time.AfterFunc(nudgeAgain, n.Nudge)
	} else {
		n.again.Reset(nudgeAgain)
	}
	return want, nil
}
