package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Host is one machine: a network namespace with the address of its eth0.
type Host struct {
	env   *Env
	name  string
	index int
	netns string // name below /run/netns
	port  string // the bridge's end of the cable
	dir   string
	addr  netip.Addr
	addr6 netip.Addr
}

// Name returns the name the host was made with.
func (h *Host) Name() string { return h.name }

// Addr returns the host's IPv4 address.
func (h *Host) Addr() netip.Addr { return h.addr }

// Addr6 returns the host's IPv6 address.
func (h *Host) Addr6() netip.Addr { return h.addr6 }

// HostPort returns "address:port" of the host.
func (h *Host) HostPort(port uint16) string { return netip.AddrPortFrom(h.addr, port).String() }

// Dir is the host's disk: a directory that goes away with the environment.
func (h *Host) Dir() string { return h.dir }

// Path returns a path on the host's disk.
func (h *Host) Path(elem ...string) string { return filepath.Join(append([]string{h.dir}, elem...)...) }

// WriteFile puts a file on the host's disk and returns its path.
func (h *Host) WriteFile(name, content string) string {
	h.env.tb.Helper()
	path := h.Path(name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		h.env.tb.Fatalf("write %s: %v", path, err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		h.env.tb.Fatalf("write %s: %v", path, err)
	}
	return path
}

// Run runs a command inside the host to its end and returns what it printed.
func (h *Host) Run(argv ...string) (string, error) {
	var out strings.Builder
	err := h.Enter(func() error {
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Dir, cmd.Stdout, cmd.Stderr = h.dir, &out, &out
		return cmd.Run()
	})
	if err != nil {
		return out.String(), fmt.Errorf("run %s on %s: %w: %s", strings.Join(argv, " "), h.name, err, out.String())
	}
	return out.String(), nil
}

// Enter calls fn on a thread that is inside the host's network. Sockets made
// and processes started by fn itself belong to the host; goroutines started
// by it do not.
func (h *Host) Enter(fn func() error) error {
	leave, err := h.enter()
	if err != nil {
		return err
	}
	defer leave()
	return fn()
}

// enter locks the goroutine to its thread and moves that into the host's
// network until leave is called.
func (h *Host) enter() (leave func(), err error) {
	runtime.LockOSThread()
	home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("open own network: %w", err)
	}
	there, err := unix.Open(filepath.Join(netnsDir, h.netns), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Setns(there, unix.CLONE_NEWNET)
		unix.Close(there)
	}
	if err != nil {
		unix.Close(home)
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("enter the network of %s: %w", h.name, err)
	}
	return func() {
		err := unix.Setns(home, unix.CLONE_NEWNET)
		unix.Close(home)
		if err == nil { // otherwise the thread is spoilt and ends with its goroutine
			runtime.UnlockOSThread()
		}
	}, nil
}

// DialContext connects from inside the host. The address must be numeric:
// a host has no resolver.
func (h *Host) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	target, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, fmt.Errorf("dial %s from %s: want a numeric address: %w", address, h.name, err)
	}
	leave, err := h.enter()
	if err != nil {
		return nil, err
	}
	left := false
	d := net.Dialer{Control: func(string, string, syscall.RawConn) error {
		// The socket exists and belongs to the host: the thread may go home
		// before the connection is made, so a slow one holds no thread.
		if !left {
			left = true
			leave()
		}
		return nil
	}}
	conn, err := d.DialContext(ctx, network, target.String())
	if !left {
		leave()
	}
	return conn, err
}

// Listen opens a listening socket inside the host.
func (h *Host) Listen(network, address string) (net.Listener, error) {
	var ln net.Listener
	err := h.Enter(func() (err error) {
		ln, err = net.Listen(network, address)
		return err
	})
	return ln, err
}

// PowerOff ends the host as a power cut would: nothing leaves it any more,
// then every process and container on it is gone. Heal and starting its
// processes again bring it back.
func (h *Host) PowerOff() {
	h.env.tb.Helper()
	h.Cut()
	killAll(h.netns, h.env.key, h.name)
	for _, mount := range mountsBelow(h.dir) {
		_ = unix.Unmount(mount, unix.MNT_DETACH) // a mount that stays shows in the removal
	}
	// What a real host keeps in /run is gone after a power cut too.
	for _, path := range []string{h.Path("docker", "exec"), h.Path("docker", "pid"), h.Path("docker.sock")} {
		if err := os.RemoveAll(path); err != nil {
			h.env.tb.Fatalf("power off %s: %v", h.name, err)
		}
	}
}

func (h *Host) create() error {
	if err := os.MkdirAll(h.dir, 0o755); err != nil {
		return err
	}
	return errors.Join(
		ip("netns", "add", h.netns),
		ipBatch(h.netns, "link set lo up"),
		ipBatch(h.env.bridge,
			"link add name "+h.port+" type veth peer name eth0 netns "+h.netns,
			"link set "+h.port+" master "+bridgeName,
			"link set "+h.port+" up"),
		ipBatch(h.netns,
			fmt.Sprintf("addr add %s/24 dev eth0", h.addr),
			fmt.Sprintf("addr add %s/64 dev eth0 nodad", h.addr6),
			"link set eth0 up"),
	)
}

// ip runs one ip(8) command.
func ip(args ...string) error {
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// ipBatch runs several ip(8) commands inside a namespace at once.
func ipBatch(netns string, lines ...string) error {
	cmd := exec.Command("ip", "-netns", netns, "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip batch %q: %w: %s", lines, err, out)
	}
	return nil
}
