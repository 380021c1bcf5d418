package engine

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// Store is what is stored. *bus.Store is one.
type Store interface {
	Read(ctx context.Context, bucket string) (map[string]bus.Entry, error)
	Swap(ctx context.Context, bucket, key string, value []byte, revision uint64) (uint64, error)
	Put(ctx context.Context, bucket, key string, value []byte) error
	Delete(ctx context.Context, bucket, key string) error
	KeepDesired(ctx context.Context, node string, want map[string]placement.Desired) error
}

// Nodes is what nodes say. *bus.Conn is one.
type Nodes interface {
	Connected() bool
	FollowReports(ctx context.Context, fn func(placement.NodeReport)) error
	// AskReport asks for a report beside those that come by themselves.
	AskReport(node string) error
	Inspect(ctx context.Context, node, container string) (placement.Captured, error)
}

// LinkState is a secure link on an ingress node.
type LinkState struct {
	Link placement.LinkID
	Open bool // it leads to its own placement
}

// Fleet is what the controller makes of everybody's liveness.
type Fleet interface {
	// PolicyNodes returns every node that joined, without facts.
	PolicyNodes() map[string]policy.Node
	// Refused says of each node whose join token does not let it have the
	// workload why it may not.
	Refused(workload string) map[string]string
	// IngressLinks returns the links of every ingress node that was heard
	// within the time.
	IngressLinks(within time.Duration) [][]LinkState
	// Generation returns the largest generation of the workload in any health
	// event, also in those from before its present policy.
	Generation(workload string) uint64
	// ConfirmLost takes an operator's word that a silent node is lost (LOS-4).
	ConfirmLost(node string) error
}

// Config configures an Engine. Everything but Timing, Revoke, Audit, Instance,
// Alone and Registerer is required.
type Config struct {
	Store    Store
	Nodes    Nodes
	Fleet    Fleet
	Instance string // of this controller, for the lease of the leader; empty: chosen
	// Alone: no other controller can exist, because the one process that may
	// be this controller holds the NATS server itself. The lease of the
	// process before is then taken at once: it cannot be at work any more.
	Alone bool
	// Revoke takes a node's identity away when it is removed; nil: refused.
	Revoke func(ctx context.Context, node string) error
	// Audit takes what happened (OBS-2); nil: it is logged only. It must not
	// block.
	Audit      func(bus.AuditEvent)
	Timing     policy.Timing // zero: policy.DefaultTiming
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

func (c Config) check() error {
	if c.Store == nil || c.Nodes == nil || c.Fleet == nil || c.Logger == nil {
		return errors.New("policy engine: store, nodes, fleet and logger are required")
	}
	return nil
}

const (
	// lookEvery is how often policies in motion are looked at without news.
	lookEvery = 100 * time.Millisecond
	// passEvery is how often every policy is looked at (LOS-2).
	passEvery = 15 * time.Second
	// passCost bounds what passes for nodes that were not known before take:
	// one part of so many.
	passCost = 4
	// repairEvery is how often the nodes' records and the members of routing
	// are compared with what is stored.
	repairEvery = 60 * time.Second
	// askEvery is how often a node that is online and was not heard is asked
	// for its report.
	askEvery    = time.Second
	storeWithin = 10 * time.Second
	// againAfter is the wait after the store refused or did not answer.
	againAfter = 500 * time.Millisecond
	// inspectWithin bounds a question to a node.
	inspectWithin = 10 * time.Second
	// maxRounds bounds the decisions about one policy without news between.
	maxRounds = 16
	// keepParallel bounds the nodes whose records are written at once.
	keepParallel = 8
)
