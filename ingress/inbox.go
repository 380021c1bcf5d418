package ingress

import (
	"context"
	"net/netip"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// Source is what the sidecar hears from the control plane. Every call blocks
// until ctx ends and calls fn from one goroutine.
type Source interface {
	FollowPlacements(ctx context.Context, fn func(placement.Event)) error
	FollowNodes(ctx context.Context, fn func(node string, lost bool, revision uint64)) error
	FollowBucket(ctx context.Context, bucket string, fn func(map[string][]byte)) error
}

// Endpoints are the link endpoints that nginx connects to.
type Endpoints interface {
	// Apply takes a full snapshot and returns at once.
	Apply(orders []upstream.Order, addr func(placement.LinkID) netip.Addr)
	// Update takes the orders of some links that Apply named; the others stay.
	Update(orders []upstream.Order)
}

// RelayAddress is where a relay is reached.
type RelayAddress struct {
	ID   string `json:"id"`
	Addr string `json:"addr"`
}

// The buckets that the sidecar follows.
const (
	BucketRoutes       = "opfield_routes"
	BucketCertificates = "opfield_certs"
	BucketRelays       = "opfield_relays"
	BucketMembers      = "opfield_members"
)

// inboxSize bounds what waits for the loop. The loop takes everything that
// waits before it acts, and needs milliseconds for a round; senders wait when
// it is full, which slows the connection they read from.
const inboxSize = 4096

// Inbox takes everything that happens outside into the one goroutine that
// owns the table. Its methods may be called concurrently, also before Run and
// after it; after Run they do nothing.
type Inbox struct {
	queue chan func(*loop)
	done  chan struct{}
}

func newInbox() *Inbox {
	return &Inbox{queue: make(chan func(*loop), inboxSize), done: make(chan struct{})}
}

func (in *Inbox) put(f func(*loop)) {
	select {
	case in.queue <- f:
	case <-in.done:
	}
}

// Event takes a placement health event.
func (in *Inbox) Event(e placement.Event) {
	in.put(func(l *loop) { l.event(e) })
}

// Node takes the controller's word about a node.
func (in *Inbox) Node(node string, lost bool, revision uint64) {
	in.put(func(l *loop) { l.node(node, lost, revision) })
}

// Links takes the reports of a relay, in the order in which they came.
func (in *Inbox) Links(relay string, reports []upstream.LinkReport) {
	in.put(func(l *loop) {
		for _, r := range reports {
			l.table.RelayReport(relay, r)
		}
	})
}

// Session takes everything that a relay knows at the beginning of a session.
// It is one step: no link closes because its report is still on the way.
func (in *Inbox) Session(relay string, authoritative bool, reports []upstream.LinkReport) {
	in.put(func(l *loop) { l.table.RelaySession(relay, authoritative, reports) })
}

// Relay says that the session with a relay ended, or that its silence about a
// link counts from now on.
func (in *Inbox) Relay(relay string, up, authoritative bool) {
	in.put(func(l *loop) { l.table.RelayUp(relay, up, authoritative) })
}

// Members takes the placements that count of workloads with a policy, encoded
// as JSON, by workload.
func (in *Inbox) Members(members map[string][]byte) {
	in.put(func(l *loop) { l.setMembers(members) })
}

// Routes takes all routes, encoded as JSON, by name.
func (in *Inbox) Routes(routes map[string][]byte) {
	in.put(func(l *loop) { l.setRoutes(routes) })
}

// Certificates takes all certificates as PEM, by name.
func (in *Inbox) Certificates(certs map[string][]byte) {
	in.put(func(l *loop) { l.setCertificates(certs) })
}

// Relays takes the addresses of all relays, encoded as JSON, by id.
func (in *Inbox) Relays(relays map[string][]byte) {
	in.put(func(l *loop) { l.setRelays(relays) })
}
