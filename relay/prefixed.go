package relay

import "net"

// prefixed gives back bytes that were read to look at them.
type prefixed struct {
	*net.TCPConn
	prefix []byte
}

// Read implements net.Conn.
func (p *prefixed) Read(b []byte) (int, error) {
	if len(p.prefix) > 0 {
		n := copy(b, p.prefix)
		p.prefix = p.prefix[n:]
		return n, nil
	}
	return p.TCPConn.Read(b)
}
