package securelink

import (
	"net"
)

// Incoming is a stream that a dialing end wants to open. The accepting end
// answers with exactly one of Accept and Refuse.
type Incoming struct {
	Open
	conn *net.TCPConn
}

// Accept answers OK. From then on the connection carries the stream, whose
// first bytes are i.First, and belongs to the caller, who must close it. It
// is reset by us when the session with the relay ends.
func (i *Incoming) Accept() (*net.TCPConn, error) {
	if err := Unwatch(i.conn); err != nil {
		return nil, err
	}
	if err := WriteFull(i.conn, AppendFrame(nil, FrameOK, nil)); err != nil {
		return nil, err
	}
	return i.conn, nil
}

// Refuse answers with a refusal and ends the connection.
func (i *Incoming) Refuse(code Code) {
	_, _ = i.conn.Write(EncodeRefusal(nil, FrameRefuse, code))
	_ = i.conn.Close()
}

// await waits for the relay's OPEN on a pooled connection and handles it.
func (s *session) await(conn *net.TCPConn) {
	t, body, err := ReadFrame(conn, nil)
	s.pool.left(conn)
	if err == nil && t != FrameOpen {
		err = ErrFrame
	}
	var o Open
	if err == nil {
		o, err = DecodeOpen(body)
	}
	if err != nil || s.track(conn) != nil {
		_ = conn.Close()
		return
	}
	defer s.untrack(conn)
	defer conn.Close()
	s.cfg.Accept(&Incoming{Open: o, conn: conn})
}
