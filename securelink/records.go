package securelink

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
)

// recordHeader is the length of a TLS record's header (RFC 8446 section 5.1).
const recordHeader = 5

// Records copies TLS records one way without being able to read them, and can
// nudge like a Nudger does at the end that holds the keys. A dialing end uses
// it for streams that lead to a sibling: when their own placement is back,
// the client must not keep them in its pool.
type Records struct {
	Dst *net.TCPConn

	draining atomic.Bool

	mu     sync.Mutex
	header []byte // of the record being copied, while it is incomplete
	left   int    // bytes of its body still to come
	app    bool   // a record of type application data has begun: the rest are too
	early  int    // bytes of the next record that are on the wire already
}

// Nudge ends the stream as soon as its user has no request under way. It never
// blocks, neither for a write under way nor for a full buffer, so a caller
// repeats it.
func (r *Records) Nudge() {
	r.draining.Store(true)
	if r.mu.TryLock() {
		defer r.mu.Unlock()
		if r.app && r.boundary() {
			r.early, _ = sendEarly(r.Dst, r.early) // an error shows at the next write
		}
	}
}

// Copy moves records from src until src ends; nil is a clean end.
func (r *Records) Copy(src *net.TCPConn) error {
	buf := make([]byte, smallRead)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if err := r.pass(buf[:n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// pass writes b.
func (r *Records) pass(b []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.early > 0 && r.boundary() && b[0] != tlsRecordType {
		return fmt.Errorf("%w: a record of type %d after application data", ErrFrame, b[0])
	}
	r.follow(b)
	// The bytes that are out already are left off; a read may end in them.
	n := min(r.early, len(b))
	r.early -= n
	if b = b[n:]; len(b) > 0 {
		if _, err := r.Dst.Write(b); err != nil {
			return err
		}
	}
	// A write of its own: a client takes what came with the answer along.
	if r.draining.Load() && r.app && r.boundary() && r.early == 0 {
		r.early, _ = sendEarly(r.Dst, 0)
	}
	return nil
}

// boundary reports whether the next byte begins a record.
func (r *Records) boundary() bool { return r.left == 0 && len(r.header) == 0 }

// follow keeps account of the record boundaries in b.
func (r *Records) follow(b []byte) {
	for len(b) > 0 {
		if r.left > 0 {
			n := min(r.left, len(b))
			r.left -= n
			b = b[n:]
			continue
		}
		n := min(recordHeader-len(r.header), len(b))
		r.header = append(r.header, b[:n]...)
		b = b[n:]
		if len(r.header) == recordHeader {
			r.app = r.app || r.header[0] == tlsRecordType
			r.left = int(r.header[3])<<8 | int(r.header[4])
			r.header = r.header[:0]
		}
	}
}
