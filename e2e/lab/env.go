package lab

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
)

// TB is the part of testing.TB that an environment reports to. A program that
// is not a test gives its own.
type TB interface {
	Helper()
	Logf(format string, args ...any)
	Fatalf(format string, args ...any)
	Cleanup(func())
	Failed() bool
}

const (
	keyPrefix  = "ofe-"
	rootDir    = "/tmp"
	netnsDir   = "/run/netns"
	logTail    = 60 // lines of each daemon's log shown after a failure
	pollEvery  = 10 * time.Millisecond
	maxHosts   = 200
	bridgeName = "br0"
)

// Env is a set of hosts on one network. Its methods end the test at once when
// the machine refuses something.
type Env struct {
	tb      TB
	key     string // unique among all processes; prefix of every name we make
	dir     string
	started time.Time
	bridge  string // name of the namespace that holds the bridge

	mu        sync.Mutex
	hosts     map[string]*Host
	order     []*Host
	nodes     []*Node
	processes []*Process
	faults    faults
	closed    bool
}

// New makes an empty environment and removes what dead processes left behind.
// The environment is closed when the test ends.
func New(tb TB) *Env {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Fatalf("the end-to-end environment needs root: run the tests as root")
	}
	if err := RemoveStale(); err != nil {
		tb.Logf("remove leftovers of an earlier run: %v", err)
	}
	key, err := newKey()
	if err != nil {
		tb.Fatalf("name the environment: %v", err)
	}
	e := &Env{
		tb: tb, key: key, dir: filepath.Join(rootDir, key), started: time.Now(),
		bridge: key + "-bridge", hosts: map[string]*Host{},
	}
	if err := os.MkdirAll(e.dir, 0o755); err != nil {
		tb.Fatalf("make the directory of the environment: %v", err)
	}
	tb.Cleanup(e.Close)
	if err := e.makeBridge(); err != nil {
		tb.Fatalf("make the network: %v", err)
	}
	return e
}

// Dir is a directory of this environment; it goes away with it.
func (e *Env) Dir() string { return e.dir }

// Close prints the logs if the test failed, stops everything and removes it.
func (e *Env) Close() {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return
	}
	e.closed = true
	nodes := e.nodes
	e.mu.Unlock()
	if e.tb.Failed() {
		e.tb.Logf("%s", e.Logs(logTail))
	}
	var wg sync.WaitGroup
	for _, n := range nodes {
		wg.Go(n.removeContainers)
	}
	wg.Wait()
	e.mu.Lock()
	processes := e.processes
	e.mu.Unlock()
	for _, p := range processes {
		wg.Go(p.Kill)
	}
	wg.Wait()
	if err := sweep(e.key); err != nil {
		e.tb.Logf("clean up: %v", err)
	}
}

// Await fails the test unless cond becomes true within the time; it returns
// how long that took.
func (e *Env) Await(within time.Duration, what string, cond func() bool) time.Duration {
	e.tb.Helper()
	start := time.Now()
	for {
		if cond() {
			return time.Since(start)
		}
		if time.Since(start) > within {
			e.tb.Fatalf("waited %v in vain: %s", within, what)
		}
		time.Sleep(pollEvery)
	}
}

// Logs returns the last lines of the log of every process, with the time
// since the environment began in front of each process' name.
func (e *Env) Logs(lines int) string {
	e.mu.Lock()
	processes := append([]*Process(nil), e.processes...)
	e.mu.Unlock()
	sort.SliceStable(processes, func(i, j int) bool { return processes[i].host.name < processes[j].host.name })
	var b strings.Builder
	for _, p := range processes {
		fmt.Fprintf(&b, "==== %s on %s (%s)\n%s\n", p.name, p.host.name, p.state(), tail(p.Log(), lines))
	}
	return b.String()
}

// Host makes a host with its own network and address, or returns the one made
// before under that name.
func (e *Env) Host(name string) *Host {
	e.tb.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	if h, ok := e.hosts[name]; ok {
		return h
	}
	if e.closed || len(e.order) >= maxHosts {
		e.tb.Fatalf("make host %s: the environment is closed or has %d hosts already", name, maxHosts)
	}
	index := len(e.order) + 1
	h := &Host{
		env: e, name: name, index: index,
		netns: e.key + "-" + name,
		port:  "v" + strconv.Itoa(index),
		dir:   filepath.Join(e.dir, name),
		addr:  netip.AddrFrom4([4]byte{10, 210, 0, byte(index)}),
		addr6: netip.MustParseAddr(fmt.Sprintf("fd10:210::%x", index)),
	}
	if err := h.create(); err != nil {
		e.tb.Fatalf("make host %s: %v", name, err)
	}
	e.hosts[name] = h
	e.order = append(e.order, h)
	return h
}

func (e *Env) adopt(p *Process) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.processes = append(e.processes, p)
}

// tail returns the last lines of a text.
func tail(text string, lines int) string {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return strings.Join(all, "\n")
}
