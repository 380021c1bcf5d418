package accept

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

const (
	// record is the largest TLS record's payload (RFC 8446 section 5.1).
	record = 16 << 10
	// request is the buffer of a stream while nothing arrives.
	request = 1 << 10
)

var (
	errServerName = errors.New("server name is not that of the link's workload")
	errProxyLine  = errors.New("malformed PROXY protocol header")
)

// serve finishes TLS and copies both ways. An error means that the stream was
// cut and must be reset.
func (a *Acceptor) serve(st *stream, r securelink.Record, conn *net.TCPConn) error {
	app, err := securelink.NewSocket(conn)
	if err != nil {
		return err
	}
	var proxy []byte
	if r.Protocol == placement.ProtocolTCP {
		if proxy, err = takeProxyLine(st.conn); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), handshakeWithin)
	defer cancel()
	t := tls.Server(st.conn, a.tls[r.Protocol])
	if err := t.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	state := t.ConnectionState()
	kind := "full"
	if state.DidResume {
		kind = "resumed"
	}
	a.handshakes.WithLabelValues(kind).Inc()
	if state.ServerName != st.link.ServerName() {
		return errServerName
	}
	st.conn.Ready()
	if len(proxy) > 0 {
		if _, err := app.Write(proxy); err != nil {
			return err
		}
	}
	var followed *turns
	if r.Protocol == placement.ProtocolHTTP {
		followed = &turns{}
	}
	return a.copy(t, st.conn, app, followed)
}

// copy moves bytes until both directions have ended cleanly, or one was cut.
// Without turns the stream is not HTTP/1.1.
func (a *Acceptor) copy(t *tls.Conn, conn *securelink.Nudger, app *securelink.Socket, turns *turns) error {
	var up error
	var wg sync.WaitGroup
	wg.Go(func() {
		if up = a.toApp(app, t, turns); up == nil {
			_ = app.CloseWrite()
			return
		}
		securelink.Abort(conn.TCPConn)
		securelink.Abort(app.TCPConn)
	})
	down := a.toClient(t, conn, app, turns)
	if down != nil {
		securelink.Abort(conn.TCPConn)
		securelink.Abort(app.TCPConn)
	}
	wg.Wait()
	return errors.Join(down, up)
}

// toClient copies until the application ends, and passes that on as
// close_notify; nil is a clean end. There is no TCP end yet: the other
// direction may go on, and the sidecar must not take this for the end of the
// stream. While the application is silent no buffer is held.
func (a *Acceptor) toClient(t *tls.Conn, conn *securelink.Nudger, app *securelink.Socket, turns *turns) error {
	for {
		buf, n, err := app.ReadPooled(&a.buffers)
		ended := errors.Is(err, io.EOF)
		if ended {
			conn.Cork() // one message less for every hop
		}
		if n > 0 {
			b := (*buf)[:n]
			if turns != nil {
				b = turns.answer(b, conn.Draining())
			}
			if _, werr := t.Write(b); werr != nil {
				err, ended = werr, false
			}
		}
		if buf != nil {
			a.buffers.Put(buf)
		}
		if ended {
			// A failed write means that the other side has gone already.
			_ = t.CloseWrite()
			_ = conn.Uncork()
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// toApp copies until the client ends; nil is a clean end. While the client is
// silent it holds a small buffer, which most requests fit into.
func (a *Acceptor) toApp(app *securelink.Socket, t *tls.Conn, turns *turns) error {
	small := make([]byte, request)
	for {
		n, err := pass(app, t, small, turns)
		if err == nil && n == len(small) {
			err = a.bulkToApp(app, t, turns)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// bulkToApp goes on with a large buffer as long as more than a request comes.
func (a *Acceptor) bulkToApp(app *securelink.Socket, t *tls.Conn, turns *turns) error {
	buf := a.buffers.Get().(*[]byte)
	defer a.buffers.Put(buf)
	for {
		if n, err := pass(app, t, *buf, turns); err != nil || n < request {
			return err
		}
	}
}

// pass passes on what one read gives.
func pass(app *securelink.Socket, t *tls.Conn, buf []byte, turns *turns) (int, error) {
	n, err := t.Read(buf)
	if n > 0 {
		if turns != nil {
			turns.request(buf[:n])
		}
		if _, err := app.Write(buf[:n]); err != nil {
			return n, err
		}
	}
	return n, err
}

// proxyLineMost is the longest header of PROXY protocol version 1.
const proxyLineMost = 107

// takeProxyLine takes a PROXY protocol header (version 1) that nginx wrote
// before its ClientHello. The application gets it once nginx is verified.
func takeProxyLine(n *securelink.Nudger) ([]byte, error) {
	const start = "PROXY "
	if len(n.First) == 0 || n.First[0] != start[0] {
		return nil, nil
	}
	for {
		if i := bytes.Index(n.First, []byte("\r\n")); i >= 0 && i+2 <= proxyLineMost {
			line := n.First[:i+2]
			n.First = n.First[i+2:]
			if !bytes.HasPrefix(line, []byte(start)) {
				return nil, errProxyLine
			}
			return line, nil
		}
		if len(n.First) >= proxyLineMost {
			return nil, errProxyLine
		}
		more := make([]byte, proxyLineMost)
		m, err := n.TCPConn.Read(more)
		if err != nil {
			return nil, err
		}
		n.First = append(n.First[:len(n.First):len(n.First)], more[:m]...)
	}
}
