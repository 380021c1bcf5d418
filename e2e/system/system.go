// Package system starts the whole product on real hosts of package lab: the
// controller, relays, an ingress node with nginx and Docker nodes, each joined
// with a token as a user would.
package system

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/opfield/availability/e2e/lab"
)

// HTTPPort is where the ingress node's nginx serves.
const HTTPPort = 8080

// startWithin bounds the start of one part.
const startWithin = 20 * time.Second

// Config says how many hosts there are.
type Config struct {
	Relays int
	Nodes  int
	// IngressArgs and NodeArgs are further arguments of the daemons.
	IngressArgs, RelayArgs, NodeArgs []string
	// Claims are architectures that engines say they have, by node id.
	Claims map[string]string
}

// Member is a daemon and its host.
type Member struct {
	*lab.Host
	Process *lab.Process
	ID      string
	argv    []string
}

// StartAnother starts the daemon once more, beside a process of it that may
// still be finishing its streams.
func (m *Member) StartAnother() {
	m.Process = m.Start(filepath.Base(m.argv[0])+"-again", m.argv...)
}

// Node is a Docker node with its agent.
type Node struct {
	*lab.Node
	Agent *lab.Process
	ID    string
}

// System is a running product.
type System struct {
	Env        *lab.Env
	Controller *Member
	Relays     []*Member
	Ingress    *Member
	Nodes      []*Node
	tb         lab.TB
	cli        string
}

// Start starts everything and waits until all parts see each other.
func Start(tb lab.TB, env *lab.Env, cfg Config) *System {
	tb.Helper()
	s := &System{Env: env, tb: tb, cli: env.Binary("./cmd/opfield")}
	s.startController()
	for i := range cfg.Relays {
		s.Relays = append(s.Relays, s.startRelay(fmt.Sprintf("relay-%d", i+1), cfg.RelayArgs))
	}
	names := make([]string, cfg.Nodes)
	for i := range names {
		names[i] = fmt.Sprintf("node-%d", i+1)
	}
	s.Nodes = make([]*Node, cfg.Nodes)
	hosts := env.Nodes(names...)
	var wg sync.WaitGroup
	for i := range hosts {
		wg.Go(func() { s.Nodes[i] = s.startNode(hosts[i], names[i], cfg.Claims[names[i]], cfg.NodeArgs) })
	}
	wg.Wait()
	s.Ingress = s.startIngress(cfg.IngressArgs)
	return s
}

func (s *System) startController() {
	h := s.Env.Host("controller")
	m := &Member{Host: h, ID: "controller"}
	m.Process = h.Start("opfield", s.cli, "--socket", s.socket(h), "serve",
		"--state-dir", h.Path("state"), "--listen", h.HostPort(8480), "--nats-listen", h.HostPort(4222),
		"--name", h.Addr().String())
	s.Controller = m
	s.Env.Await(startWithin, "the controller answers", func() bool {
		_, err := h.Run(s.cli, "--socket", s.socket(h), "--json", "route", "list")
		return err == nil
	})
}

func (s *System) socket(h *lab.Host) string { return h.Path("run", "api.sock") }

// Socket returns the path of the controller's API socket.
func (s *System) Socket() string { return s.socket(s.Controller.Host) }

// CLI runs the opfield command on the controller's host.
func (s *System) CLI(args ...string) (string, error) {
	return s.Controller.Run(append([]string{s.cli, "--socket", s.socket(s.Controller.Host)}, args...)...)
}

// MustCLI is CLI that ends the test on an error.
func (s *System) MustCLI(args ...string) string {
	s.tb.Helper()
	out, err := s.CLI(args...)
	if err != nil {
		s.tb.Fatalf("opfield %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// join joins a host in its role.
func (s *System) join(h *lab.Host, program, role, id string, more ...string) {
	var token string
	for line := range strings.Lines(s.MustCLI("token", "create", "--role", role, "--id", id)) {
		if line = strings.TrimSpace(line); !strings.Contains(line, " ") {
			token = line // the other lines are talk
		}
	}
	file := h.WriteFile("token", token)
	args := append([]string{program, "join", "--controller", s.Controller.HostPort(8480), "--token", "@" + file,
		"--id", id, "--identity-dir", h.Path("identity")}, more...)
	if out, err := h.Run(args...); err != nil {
		s.tb.Fatalf("join %s: %v\n%s", id, err, out)
	}
}

func (s *System) startRelay(id string, more []string) *Member {
	h := s.Env.Host(id)
	program := s.Env.Binary("./cmd/opfield-relay")
	s.join(h, program, "relay", id, "--advertise", h.HostPort(9443))
	args := append([]string{program, "run", "--identity-dir", h.Path("identity"), "--state-dir", h.Path("state"),
		"--listen", h.HostPort(9443), "--pid-file", h.Path("relay.pid")}, more...)
	return &Member{Host: h, ID: id, argv: args, Process: h.Start("opfield-relay", args...)}
}

func (s *System) startNode(n *lab.Node, id, claim string, more []string) *Node {
	socket := n.Socket()
	if claim != "" {
		front := n.BlockingSocket()
		front.Claim(claim)
		socket = front.Address()
	}
	program := s.Env.Binary("./cmd/opfield-node")
	s.join(n.Host, program, "node", id)
	args := append([]string{program, "run", "--identity-dir", n.Path("identity"), "--state-dir", n.Path("state"),
		"--docker", socket}, more...)
	return &Node{Node: n, ID: id, Agent: n.Start("opfield-node", args...)}
}

func (s *System) startIngress(more []string) *Member {
	h := s.Env.Host("ingress-1")
	program := s.Env.Binary("./cmd/opfield-ingress")
	s.join(h, program, "ingress", "ingress-1")
	args := append([]string{program, "run", "--identity-dir", h.Path("identity"), "--state-dir", h.Path("state"),
		"--run-dir", h.Path("run"), "--log-dir", h.Path("log"), "--http-port", fmt.Sprint(HTTPPort), "--https-port", "8443",
		"--plain-grpc-port", "8081", "--connections", "4096", "--pid-file", h.Path("ingress.pid")}, more...)
	return &Member{Host: h, ID: "ingress-1", argv: args, Process: h.Start("opfield-ingress", args...)}
}

// Link is one link as the ingress node shows it.
type Link struct {
	Link    string    `json:"link"`
	Address string    `json:"address"`
	State   string    `json:"state"`
	Reason  string    `json:"reason"`
	Since   time.Time `json:"since"`
	Streams int       `json:"streams"`
}

// IngressStatus is what the sidecar says about itself.
type IngressStatus struct {
	Routes []struct{ Name, Health, Error string } `json:"routes"`
	Links  []Link                                 `json:"links"`
	Reload struct {
		Generation, Result, Error string
		At                        time.Time
		Pending                   bool
	} `json:"reload"`
	Relays []struct {
		ID        string `json:"id"`
		Connected bool   `json:"connected"`
		Err       string `json:"err"`
	} `json:"relays"`
	NATS string `json:"nats"`
}

// IngressStatus asks the sidecar itself: no controller and no NATS is needed.
func (s *System) IngressStatus() (IngressStatus, error) {
	var st IngressStatus
	body, err := Get(s.Ingress.Host, "http://127.0.0.1:9102/status")
	if err == nil {
		err = json.Unmarshal(body, &st)
	}
	return st, err
}

// LinkState returns the state of a link such as "web.node-1/8080", or "".
func (s *System) LinkState(link string) string {
	st, err := s.IngressStatus()
	if err != nil {
		return ""
	}
	for _, l := range st.Links {
		if l.Link == link {
			return l.State
		}
	}
	return ""
}

// AwaitLinks waits until the links are in the state.
func (s *System) AwaitLinks(within time.Duration, state string, links ...string) time.Duration {
	s.tb.Helper()
	return s.Env.Await(within, fmt.Sprintf("links %s are %s", strings.Join(links, ", "), state), func() bool {
		for _, l := range links {
			if s.LinkState(l) != state {
				return false
			}
		}
		return true
	})
}

// AwaitRoute waits until nginx serves the host name with a 200, and nothing
// else any more: after a reload nginx lets the old workers accept for another
// 100 ms (ngx_master_process_cycle, "allow new processes to start"), so the
// first 200 may be followed by the 404 of the generation before.
func (s *System) AwaitRoute(within time.Duration, host string) time.Duration {
	s.tb.Helper()
	var since time.Time
	return s.Env.Await(within, "route "+host+" answers 200", func() bool {
		if status, _ := GetHost(s.Client(), s.Ingress.HostPort(HTTPPort), host, "/ok"); status != 200 {
			since = time.Time{}
		} else if since.IsZero() {
			since = time.Now()
		}
		return !since.IsZero() && time.Since(since) > oldWorkers
	})
}

// oldWorkers is longer than the workers of the generation before accept.
const oldWorkers = 300 * time.Millisecond

// DroppedAt returns when the first and the last relay dropped the node's
// session after a moment, from their logs.
func (s *System) DroppedAt(node string, after time.Time) (first, last time.Time) {
	for _, r := range s.Relays {
		for line := range strings.Lines(r.Process.Log()) {
			var entry struct {
				Time time.Time `json:"time"`
				Msg  string    `json:"msg"`
				Peer string    `json:"peer"`
			}
			if json.Unmarshal([]byte(line), &entry) != nil || entry.Msg != "session down" || entry.Peer != "node/"+node || !entry.Time.After(after) {
				continue
			}
			if first.IsZero() || entry.Time.Before(first) {
				first = entry.Time
			}
			if entry.Time.After(last) {
				last = entry.Time
			}
			break
		}
	}
	return first, last
}

// Client is a host from which users come.
func (s *System) Client() *lab.Host { return s.Env.Host("client") }

// NginxPID returns the process id of the ingress node's nginx master.
func (s *System) NginxPIDFile() string { return filepath.Join(s.Ingress.Path("run"), "nginx.pid") }
