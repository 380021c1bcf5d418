package e2e

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/ingress/ingresstest"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

const (
	manyStreams   = 10000
	openAtOnce    = 16
	leftWithin    = 10 * time.Second
	perStreamKB   = 40      // memory of the relay for one stream, at most
	stalledMost   = 100     // streams whose reader does not read
	stalledKB     = 2 << 10 // memory of the relay for each, at most
	descriptors   = 65536   // that the test asks for
	ownAndPools   = 600     // descriptors of a relay beside its streams
	echoEnd       = "OPFIELD_E2E_ECHO_END"
	perStreamFDs  = 2
	poolsMost     = 2 * 256 // warm connections that a burst may leave
	growthAllowed = 64 << 10
)

// relayRig is a relay in a process of its own between two peers in this one.
type relayRig struct {
	t       *testing.T
	ca      *identitytest.CA
	address string
	pid     int
	link    placement.LinkID
	from    *securelink.Relays
	stall   chan struct{}  // at the accepting end; closed: it reads on
	goOn    io.WriteCloser // at the dialing end; closed: it reads on
}

// streams is how many the descriptors of a process allow, 10,000 at most.
func (r *relayRig) streams() int {
	var limit unix.Rlimit
	require.NoError(r.t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	n := min(manyStreams, (int(limit.Cur)-ownAndPools)/perStreamFDs)
	if n < manyStreams {
		r.t.Logf("this machine allows %d descriptors for a process, which is too few for %d streams: %d are made", limit.Cur, manyStreams, n)
	}
	return n
}

func newRelayRig(t *testing.T) *relayRig {
	t.Helper()
	// Where that is refused, streams() makes fewer.
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: descriptors, Max: descriptors})
	env := lab.New(t) // only for the binary; no host is made
	r := &relayRig{t: t, ca: identitytest.New(t), link: capacityLink()}
	id := r.ca.Identity(t, identity.RoleRelay, "relay-1")
	r.address = fmt.Sprintf("127.0.0.1:%d", ingresstest.FreePort(t))
	log, err := os.Create(filepath.Join(t.TempDir(), "relay.log"))
	require.NoError(t, err)
	// There is no NATS: traffic does not depend on it.
	cmd := exec.Command(env.Binary("./cmd/opfield-relay"), "run", "--identity-dir", id.Dir(), "--state-dir", t.TempDir(),
		"--listen", r.address, "--metrics", "", "--nats", "nats://127.0.0.1:1")
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(t, cmd.Start())
	r.pid = cmd.Process.Pid
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if text, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("relay:\n%s", text)
		}
	})
	node := r.ca.Identity(t, identity.RoleNode, "node-1")
	self, err := os.Executable()
	require.NoError(t, err)
	far := exec.Command(self, "-test.run", "^TestCapacity_EchoEnd$", "-test.timeout", "5m")
	far.Env = append(os.Environ(), echoEnd+"="+node.Dir()+","+r.address)
	far.Stdout, far.Stderr = log, log
	r.goOn, err = far.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, far.Start())
	t.Cleanup(func() { _ = far.Process.Kill(); _ = far.Wait() })
	r.from = r.peer(r.ca.Identity(t, identity.RoleIngress, "ingress-1"), securelink.RelaysConfig{Watcher: silent{}})
	return r
}

func capacityLink() placement.LinkID {
	return placement.LinkID{Placement: placement.ID{Workload: "web", Node: "node-1"}, Port: 80}
}

// TestCapacity_EchoEnd is the accepting end of TestCapacity_ManyStreams in a
// process of its own, because of the limit of descriptors; by itself it does
// nothing.
func TestCapacity_EchoEnd(t *testing.T) {
	dir, address, asked := strings.Cut(os.Getenv(echoEnd), ",")
	if !asked {
		return
	}
	id, err := identity.Open(dir)
	require.NoError(t, err)
	r := &relayRig{t: t, address: address, link: capacityLink(), stall: make(chan struct{})}
	links := &securelink.LinkSet{}
	links.Set([]securelink.Record{{
		Link: r.link, Protocol: placement.ProtocolTCP, Kind: placement.KindContainer,
		Role: placement.RoleServing, State: placement.StateRunning, Ready: true,
	}})
	r.peer(id, securelink.RelaysConfig{Links: links, Accept: r.echo})
	_, _ = io.Copy(io.Discard, os.Stdin)
	close(r.stall)
	select {} // until it is killed
}

// echo answers until the stream ends; one that begins with "stall" is not read
// until the test says so.
func (r *relayRig) echo(in *securelink.Incoming) {
	c, err := in.Accept()
	if err != nil {
		return
	}
	defer c.Close()
	_, _ = c.Write(in.First)
	if string(in.First) == "stall" {
		<-r.stall
		return
	}
	buf := make([]byte, 64)
	for {
		n, err := c.Read(buf)
		if err != nil {
			return
		}
		if _, err := c.Write(buf[:n]); err != nil {
			return
		}
	}
}

func (r *relayRig) peer(who *identity.Identity, cfg securelink.RelaysConfig) *securelink.Relays {
	r.t.Helper()
	cfg.TLS = func(relay string) *tls.Config {
		return who.ClientTLS(identity.Name{Role: identity.RoleRelay, ID: relay})
	}
	cfg.Instance, cfg.Logger = uint64(time.Now().UnixNano()), slog.New(slog.DiscardHandler)
	rs := securelink.NewRelays(cfg)
	rs.Set([]securelink.RelayAddress{{ID: "relay-1", Addr: r.address}})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { rs.Run(ctx) })
	r.t.Cleanup(func() { cancel(); wg.Wait() })
	require.Eventually(r.t, func() bool { return rs.Reachable() == 1 }, 20*time.Second, 5*time.Millisecond)
	return rs
}

// open opens a stream and reads back what it began with.
func (r *relayRig) open(first string) (*securelink.Stream, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	st, err := r.from.Open(ctx, securelink.Open{Link: r.link, First: []byte(first)})
	if err != nil {
		return nil, err
	}
	return st, expect(st.Conn, first)
}

func expect(c net.Conn, want string) error {
	got := make([]byte, len(want))
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if string(got) != want {
		return fmt.Errorf("received %q, want %q", got, want)
	}
	return nil
}

type silent struct{}

func (silent) Up(string, time.Duration, []securelink.Report, []securelink.NodeSession) {}
func (silent) Report(string, securelink.Report)                                        {}
func (silent) NodeSession(string, securelink.NodeSession)                              {}
func (silent) Down(string, time.Duration)                                              {}

// usage is what a process holds.
type usage struct{ residentKB, descriptors int }

func (r *relayRig) usage() usage {
	r.t.Helper()
	var u usage
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.pid))
	require.NoError(r.t, err)
	for line := range strings.Lines(string(status)) {
		_, _ = fmt.Sscanf(line, "VmRSS: %d kB", &u.residentKB)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.pid))
	require.NoError(r.t, err)
	u.descriptors = len(fds)
	return u
}

// LNK-9: 10,000 concurrent streams through one relay cost bounded memory and
// descriptors, all of them work, and nothing is left after their end; a reader
// that does not read costs the relay nothing either.
func TestCapacity_ManyStreams(t *testing.T) {
	r := newRelayRig(t)
	require.Eventually(t, func() bool {
		st, err := r.open("hi")
		if err == nil {
			st.Close()
		}
		return err == nil
	}, 10*time.Second, 10*time.Millisecond)
	before, goroutines := r.usage(), runtime.NumGoroutine()

	begun, many := time.Now(), r.streams()
	streams := make([]*securelink.Stream, many)
	var wg sync.WaitGroup
	for w := range openAtOnce {
		wg.Go(func() {
			for i := w; i < many; i += openAtOnce {
				st, err := r.open("hello")
				if err != nil {
					t.Errorf("stream %d: %v", i, err)
					return
				}
				streams[i] = st
			}
		})
	}
	wg.Wait()
	require.False(t, t.Failed())
	opened := time.Since(begun)
	for i, st := range streams {
		word := fmt.Sprintf("%08d", i)
		_, err := st.Conn.Write([]byte(word))
		require.NoError(t, err)
		require.NoError(t, expect(st.Conn, word), "stream %d", i)
	}
	at := r.usage()
	t.Logf("%d streams opened in %v (%.0f/s)", many, opened.Round(time.Millisecond), float64(many)/opened.Seconds())
	t.Logf("relay: before %+v, with all streams %+v: %.1f kB and %.2f descriptors a stream", before, at,
		float64(at.residentKB-before.residentKB)/float64(many), float64(at.descriptors-before.descriptors)/float64(many))
	require.Less(t, at.residentKB-before.residentKB, many*perStreamKB)
	require.LessOrEqual(t, at.descriptors-before.descriptors, many*perStreamFDs+poolsMost)

	begun = time.Now()
	for _, st := range streams {
		st.Close()
	}
	var after usage
	require.Eventually(t, func() bool {
		after = r.usage()
		return after.descriptors <= before.descriptors+poolsMost && runtime.NumGoroutine() <= goroutines+poolsMost
	}, leftWithin, 20*time.Millisecond, "something is left")
	t.Logf("relay after all closed: %+v, within %v; goroutines of the dialing peer %d before, %d after",
		after, time.Since(begun).Round(time.Millisecond), goroutines, runtime.NumGoroutine())

	// The same streams again need no more memory than the first ones did.
	var stalled []*securelink.Stream
	written := 0
	calm := r.usage()
	for range stalledMost {
		st, err := r.open("stall")
		require.NoError(t, err)
		stalled = append(stalled, st)
		_ = st.Conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		n, err := st.Conn.Write(make([]byte, 32<<20))
		require.Error(t, err, "a reader that does not read must hold its writer back")
		written += n
	}
	held := r.usage()
	st, err := r.open("others are not stalled")
	require.NoError(t, err)
	st.Close()
	t.Logf("%d streams whose reader stands still: %d kB accepted of each, relay grew by %d kB in all", stalledMost,
		written/stalledMost>>10, held.residentKB-calm.residentKB)
	require.Less(t, held.residentKB-calm.residentKB, stalledMost*stalledKB)
	require.NoError(t, r.goOn.Close())
	for _, st := range stalled {
		st.Close()
	}
	require.Eventually(t, func() bool { return r.usage().descriptors <= before.descriptors+poolsMost }, leftWithin, 20*time.Millisecond)
	require.Less(t, r.usage().residentKB, at.residentKB+growthAllowed)
}
