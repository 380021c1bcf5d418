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
		if r.app && r.left == 0 && len(r.header) == 0 {
			r.early, _ = sendEarly(r.Dst, r.early) // an error shows at the next write
		}
	}
}

// Copy moves records from src until src ends; nil is a clean end.
func (r *Records) Copy(src *net.TCPConn) error {
	buf := make([]byte, smallRead+1)
	for {
		n, err := src.Read(buf[:smallRead])
		if n > 0 {
			if err := r.pass(buf[:n], buf[:n+1]); err != nil {
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

// pass writes b; room is b with space for one more byte.
func (r *Records) pass(b, room []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.early > 0 && r.left == 0 && len(r.header) == 0 && b[0] != tlsRecordType {
		return fmt.Errorf("%w: a record of type %d after application data", ErrFrame, b[0])
	}
	r.follow(b)
	// The bytes that are out already are left off; a read may end in them.
	n := min(r.early, len(b))
	r.early -= n
	b, room = b[n:], room[n:]
	if r.draining.Load() && r.app && r.left == 0 && len(r.header) == 0 && r.early == 0 {
		b = room
		b[len(b)-1] = tlsRecordType
		r.early = 1
	}
	if len(b) == 0 {
		return nil
	}
	_, err := r.Dst.Write(b)
	return err
}

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
