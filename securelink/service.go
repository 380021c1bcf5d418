package securelink

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/opfield/availability/placement"
)

// serviceALPN begins the TLS application protocol inside a service link; the
// name of the service follows. So a relay cannot lead a caller to another
// service of the same end.
const serviceALPN = "opfield-service/"

// ErrService is returned when the end of a service link is not that of the
// service.
var ErrService = errors.New("it is another service")

// ServiceConfig configures a Service.
type ServiceConfig struct {
	Name string // of the service, such as "registry"
	// TLS requires a client certificate of a role that may call the service;
	// ALPN is set by the service.
	TLS    *tls.Config
	Logger *slog.Logger
}

// Service is the accepting end of a service link: a net.Listener whose
// connections are the streams that the relays bring, after their end-to-end
// handshake. Each is a *ServiceConn.
type Service struct {
	cfg    ServiceConfig
	tls    *tls.Config
	link   placement.LinkID
	conns  chan *ServiceConn
	closed chan struct{}
	close  func()
}

// NewService returns a Service. Its Records are to be registered and Take is
// to be called for its streams.
func NewService(cfg ServiceConfig) *Service {
	s := &Service{
		cfg: cfg, link: placement.ServiceLink(cfg.Name), tls: serviceTLS(cfg.TLS, cfg.Name),
		conns: make(chan *ServiceConn), closed: make(chan struct{}),
	}
	s.close = sync.OnceFunc(func() { close(s.closed) })
	return s
}

func serviceTLS(base *tls.Config, name string) *tls.Config {
	conf := base.Clone()
	conf.NextProtos = []string{serviceALPN + name}
	conf.DynamicRecordSizingDisabled = true // bulk: each record is a system call at every hop
	return conf
}

// Record returns what is registered at the relays.
func (s *Service) Record() Record {
	return Record{
		Link: s.link, Protocol: placement.ProtocolTCP,
		Role: placement.RoleServing, State: placement.StateRunning, Ready: true,
	}
}

// Take answers one stream and returns when its connection is closed.
func (s *Service) Take(in *Incoming) {
	if in.Link != s.link {
		in.Refuse(NotRegistered)
		return
	}
	select {
	case <-s.closed:
		in.Refuse(ShuttingDown)
		return
	default:
	}
	tcp, err := in.Accept()
	if err != nil {
		return
	}
	defer tcp.Close()
	ctx, cancel := context.WithTimeout(context.Background(), HandshakeWithin)
	t := tls.Server(&begun{TCPConn: tcp, first: in.First}, s.tls)
	err = t.HandshakeContext(ctx)
	cancel()
	if err == nil {
		err = s.isOurs(t)
	}
	if err != nil {
		s.cfg.Logger.Debug("stream of a service refused", "link", s.link.String(), "err", err)
		return
	}
	conn := &ServiceConn{Conn: t, tls: t, done: make(chan struct{})}
	select {
	case s.conns <- conn:
		<-conn.done
	case <-s.closed:
	}
}

func (s *Service) isOurs(t *tls.Conn) error {
	if got := t.ConnectionState().NegotiatedProtocol; got != s.tls.NextProtos[0] {
		return fmt.Errorf("%w: caller speaks %q, want %q", ErrService, got, s.tls.NextProtos[0])
	}
	return nil
}

// Accept implements net.Listener.
func (s *Service) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. Connections that were accepted go on.
func (s *Service) Close() error {
	s.close()
	return nil
}

// Addr implements net.Listener.
func (s *Service) Addr() net.Addr { return serviceAddr(s.link.String()) }

type serviceAddr string

func (serviceAddr) Network() string  { return "opfield" }
func (a serviceAddr) String() string { return string(a) }

// ServiceConn is one stream of a service link at its accepting end.
type ServiceConn struct {
	net.Conn
	tls  *tls.Conn
	once sync.Once
	done chan struct{}
}

// Close implements net.Conn.
func (c *ServiceConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { close(c.done) })
	return err
}

// Caller returns the verified state of the other end.
func (c *ServiceConn) Caller() tls.ConnectionState { return c.tls.ConnectionState() }

// begun gives back the bytes that came with OPEN.
type begun struct {
	*net.TCPConn
	first []byte
}

// Read implements net.Conn.
func (b *begun) Read(p []byte) (int, error) {
	if len(b.first) > 0 {
		n := copy(p, b.first)
		b.first = b.first[n:]
		return n, nil
	}
	return b.TCPConn.Read(p)
}

// DialService opens a connection to a service of the product through the best
// relay; conf verifies who answers. ctx bounds the dialing only.
func (r *Relays) DialService(ctx context.Context, name string, conf *tls.Config) (net.Conn, error) {
	st, err := r.Open(ctx, Open{Link: placement.ServiceLink(name)})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", placement.ServiceLink(name), err)
	}
	conf = serviceTLS(conf, name)
	t := tls.Client(&dialled{TCPConn: st.Conn, stream: st}, conf)
	if err := t.HandshakeContext(ctx); err != nil {
		st.Close()
		return nil, fmt.Errorf("open %s: %w", placement.ServiceLink(name), err)
	}
	if t.ConnectionState().NegotiatedProtocol != conf.NextProtos[0] {
		st.Close()
		return nil, fmt.Errorf("open %s: %w", placement.ServiceLink(name), ErrService)
	}
	return t, t.SetDeadline(time.Time{})
}

// dialled releases its stream when it is closed.
type dialled struct {
	*net.TCPConn
	stream *Stream
}

// Close implements net.Conn.
func (d *dialled) Close() error {
	d.stream.Close()
	return nil
}
