package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opfield/availability/securelink"
)

// DefaultPort is the port of every link endpoint. It lies outside the usual
// net.ipv4.ip_local_port_range.
const DefaultPort = 7443

// Network is the loopback range that link endpoints are taken from.
func Network() netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{127, 64, 0, 0}), 10)
}

// Listen opens the one socket behind all link endpoints. It is bound to every
// address, but to the loopback device only (SO_BINDTODEVICE, socket(7)), so
// that nothing outside this host reaches it; which endpoint a connection
// means is its local address.
func Listen(ctx context.Context, port uint16) (net.Listener, error) {
	conf := securelink.ListenConfig() // nginx begins with its ClientHello
	first := conf.Control
	conf.Control = func(network, address string, c syscall.RawConn) error {
		var opt error
		err := c.Control(func(fd uintptr) {
			opt = unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "lo")
		})
		return errors.Join(err, opt, first(network, address, c))
	}
	ln, err := conf.Listen(ctx, "tcp4", net.JoinHostPort("0.0.0.0", strconv.Itoa(int(port))))
	if err != nil {
		return nil, fmt.Errorf("listen for link endpoints on port %d of the loopback device (another program may use the port, or the process lacks CAP_NET_RAW): %w", port, err)
	}
	return ln, nil
}
