package securelink

import (
	"errors"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Watch makes the kernel give up on c when sent data stays unacknowledged for
// UserTimeout, and probe it after a second of silence: for control connections
// and for data connections while they are pooled. A peer process that is
// merely busy does not trip it, because its kernel acknowledges.
func Watch(c *net.TCPConn) error {
	return keepalive(c, UserTimeout, net.KeepAliveConfig{Enable: true, Idle: PingAfter, Interval: time.Second, Count: 2})
}

// Unwatch undoes Watch for a data connection that carries a stream:
// TCP_USER_TIMEOUT also fires on a reader that is merely slow. A joined
// stream ends with its session instead.
func Unwatch(c *net.TCPConn) error {
	return keepalive(c, 0, net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 6})
}

func keepalive(c *net.TCPConn, userTimeout time.Duration, ka net.KeepAliveConfig) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var opt error
	err = raw.Control(func(fd uintptr) {
		for _, o := range [...]struct{ level, name, value int }{
			{unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout / time.Millisecond)},
			{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(ka.Idle / time.Second)},
			{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int(ka.Interval / time.Second)},
			{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, ka.Count},
			{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		} {
			opt = errors.Join(opt, rawSetsockopt(int(fd), o.level, o.name, int32(o.value)))
		}
	})
	return errors.Join(err, opt)
}

// deferAccept is how long a connection may stay silent before it is accepted
// all the same.
const deferAccept = 5 * time.Second

// ListenConfig returns the configuration of listeners whose peers speak first:
// the kernel keeps a connection back until there is something to read
// (TCP_DEFER_ACCEPT, tcp(7)), which saves a wake-up for each.
func ListenConfig() *net.ListenConfig {
	lc := &net.ListenConfig{
		KeepAlive: -1, // set by Watch
		Control: func(_, _ string, c syscall.RawConn) error {
			var opt error
			err := c.Control(func(fd uintptr) {
				opt = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, int(deferAccept/time.Second))
			})
			return errors.Join(err, opt)
		},
	}
	lc.SetMultipathTCP(false) // nobody here speaks it, and it makes every accept dearer
	return lc
}

// unacknowledged reports whether sent data waits for its acknowledgement, and
// how long ago the last one came in (TCP_INFO). The kernel's own timer starts
// with the first retransmission and may be 0.4 s late; a promise needs better.
func unacknowledged(c *net.TCPConn) (waiting bool, acked time.Duration) {
	raw, err := c.SyscallConn()
	if err != nil {
		return false, 0
	}
	var info *unix.TCPInfo
	if err := raw.Control(func(fd uintptr) {
		info, _ = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}); err != nil || info == nil {
		return false, 0
	}
	return info.Unacked > 0, time.Duration(info.Last_ack_recv) * time.Millisecond
}

// Abort closes c with a reset instead of an end of stream.
func Abort(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// stale reports whether a connection that should be silent has ended or holds
// bytes nobody asked for. It does not block.
func stale(c *net.TCPConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return true
	}
	var b [1]byte
	gone := true
	err = raw.Control(func(fd uintptr) {
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		gone = !errors.Is(err, syscall.EAGAIN)
	})
	return err != nil || gone
}

func ignoringEINTR(fn func() (int, error)) (int, error) {
	for {
		n, err := fn()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
