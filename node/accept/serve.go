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

// record is the largest TLS record's payload (RFC 8446 section 5.1).
const record = 16 << 10

var (
	errServerName = errors.New("server name is not that of the link's workload")
	errProxyLine  = errors.New("malformed PROXY protocol header")
)

// serve finishes TLS and copies both ways. An error means that the stream was
// cut and must be reset.
func (a *Acceptor) serve(st *stream, r securelink.Record, app *net.TCPConn) error {
	var proxy []byte
	if r.Protocol == placement.ProtocolTCP {
		var err error
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
	if t.ConnectionState().ServerName != st.link.ServerName() {
		return errServerName
	}
	st.conn.Ready()
	if len(proxy) > 0 {
		if _, err := app.Write(proxy); err != nil {
			return err
		}
	}
	return a.copy(t, st.conn, app)
}

// copy moves bytes until both directions have ended cleanly, or one was cut.
func (a *Acceptor) copy(t *tls.Conn, conn *securelink.Nudger, app *net.TCPConn) error {
	var up error
	var wg sync.WaitGroup
	wg.Go(func() {
		if up = a.direction(app, t); up == nil {
			_ = app.CloseWrite()
			return
		}
		securelink.Abort(conn.TCPConn)
		securelink.Abort(app)
	})
	down := a.direction(t, app)
	if down == nil {
		// close_notify, but no TCP end yet: the other direction may go on,
		// and the sidecar must not take this for the end of the stream.
		_ = t.CloseWrite()
	} else {
		securelink.Abort(conn.TCPConn)
		securelink.Abort(app)
	}
	wg.Wait()
	return errors.Join(down, up)
}

// direction copies until src ends; nil is a clean end.
func (a *Acceptor) direction(dst io.Writer, src io.Reader) error {
	buf, ok := a.buffers.Get().(*[]byte)
	if !ok {
		b := make([]byte, 2*record)
		buf = &b
	}
	defer a.buffers.Put(buf)
	for {
		n, err := src.Read(*buf)
		if n > 0 {
			if _, err := dst.Write((*buf)[:n]); err != nil {
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
