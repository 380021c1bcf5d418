package accept

import (
	"bytes"
	"sync/atomic"
)

// farewell is the field that ends a connection behind the answer that has it
// (RFC 9112 section 9.6).
const farewell = "Connection: close\r\n"

// turns follows whose turn it is on a stream of HTTP/1.1, so that the next
// answer of a placement that drains can be given the farewell. A nudge only
// ends a connection that is idle for some milliseconds: where nothing else
// serves, nginx puts every request on the few connections that it has kept, and
// they never are. Nothing is parsed: nginx sends no request before the answer
// to the one before is complete, so a request line that is the first thing
// after an answer, and a status line that is the first thing after that, are
// what they look like. Where one does not come in one piece, the nudge remains.
//
// One goroutine calls request, another answer.
type turns struct{ turn atomic.Int32 }

const (
	turnAnswered int32 = iota // or nothing was sent yet
	turnAsked                 // what was sent since the last answer begins with a request line
	turnUnknown               // it does not
)

// request takes note of bytes for the application.
func (t *turns) request(b []byte) {
	if t.turn.Load() != turnAnswered {
		return
	}
	if beginsRequest(b) {
		t.turn.Store(turnAsked)
	} else {
		t.turn.Store(turnUnknown)
	}
}

// answer takes note of bytes from the application. If draining is set, the
// start of an answer is returned with the farewell in it.
func (t *turns) answer(b []byte, draining bool) []byte {
	asked := t.turn.Swap(turnAnswered) == turnAsked
	if !asked || !draining {
		return b
	}
	at := statusLine(b)
	if at == 0 {
		return b
	}
	with := make([]byte, 0, len(b)+len(farewell))
	with = append(with, b[:at]...)
	with = append(with, farewell...)
	return append(with, b[at:]...)
}

// beginsRequest reports whether b begins with a whole request line of HTTP/1.1.
func beginsRequest(b []byte) bool {
	end := bytes.Index(b, []byte(" HTTP/1.1\r\n"))
	return end > 0 && bytes.IndexByte(b[:end], '\n') < 0
}

// statusLine returns the length of the status line of a final answer in
// HTTP/1.1 that b begins with; 0 if there is none.
func statusLine(b []byte) int {
	const start = "HTTP/1.1 "
	if len(b) < len(start)+1 || string(b[:len(start)]) != start || b[len(start)] < '2' || b[len(start)] > '5' {
		return 0
	}
	return bytes.IndexByte(b, '\n') + 1
}
