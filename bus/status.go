package bus

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

const (
	// StatusEvery is the longest time between two status messages of a
	// process; they are its sign of life on NATS.
	StatusEvery = 2 * time.Second
	// statusCheckEvery bounds how late a change is told. A large status is
	// looked at less often, so that this costs at most 1/statusCost of a core,
	// but never less often than every StatusEvery.
	statusCheckEvery = 80 * time.Millisecond
	statusCost       = 50
	statusQueue      = 4096 // statuses waiting for the controller
)

// Status is what a process tells about itself, every StatusEvery and soon
// after a change. Only the part of its role is set.
type Status struct {
	Name      identity.Name  `json:"name"`
	Version   string         `json:"version"`
	StartedAt time.Time      `json:"startedAt"`
	At        time.Time      `json:"at"`
	Expires   time.Time      `json:"certificateExpires"`
	Node      *NodeStatus    `json:"node,omitempty"`
	Relay     *RelayStatus   `json:"relay,omitempty"`
	Ingress   *IngressStatus `json:"ingress,omitempty"`
}

// NodeStatus is the part of a node agent.
type NodeStatus struct {
	Placements []placement.Event    `json:"placements"`
	Relays     []RelaySessionStatus `json:"relays"`
	Docker     string               `json:"docker"` // "ok" or the error
	Warnings   []string             `json:"warnings,omitempty"`
}

// RelaySessionStatus is how a node or an ingress node sees a relay.
type RelaySessionStatus struct {
	ID        string    `json:"id"`
	Addr      string    `json:"addr"`
	Connected bool      `json:"connected"`
	Since     time.Time `json:"since"`
	Err       string    `json:"err,omitempty"`
}

// RelayStatus is the part of a relay.
type RelayStatus struct {
	Addr     string         `json:"addr"`
	Sessions []RelaySession `json:"sessions"`
	Streams  int            `json:"streams"`
}

// RelaySession is one peer of a relay.
type RelaySession struct {
	Name    identity.Name `json:"name"`
	Since   time.Time     `json:"since"`
	Links   int           `json:"links"`
	Streams int           `json:"streams"`
}

// IngressStatus is the part of an ingress sidecar.
type IngressStatus struct {
	Routes            []RouteStatus        `json:"routes"`
	Links             []LinkStatus         `json:"links"`
	Reload            ReloadStatus         `json:"reload"`
	Relays            []RelaySessionStatus `json:"relays"`
	NATS              string               `json:"nats"`
	CertificateExpiry time.Time            `json:"certificateExpiry"` // the earliest of the served ones
}

// RouteStatus is one route on an ingress node.
type RouteStatus struct {
	Name   string `json:"name"`
	Health string `json:"health"`
	Error  string `json:"error,omitempty"`
}

// LinkStatus is one secure link on an ingress node.
type LinkStatus struct {
	Link     string    `json:"link"`
	Workload string    `json:"workload"`
	Address  string    `json:"address"`
	State    string    `json:"state"`
	Reason   string    `json:"reason,omitempty"`
	Since    time.Time `json:"since"`
	Streams  int       `json:"streams"`
}

// ReloadStatus is the last reload of nginx.
type ReloadStatus struct {
	Generation string    `json:"generation"`
	At         time.Time `json:"at"`
	Result     string    `json:"result"`
	Error      string    `json:"error,omitempty"`
	Pending    bool      `json:"pending"`
}

// PublishStatus sends what status returns, every StatusEvery and within
// 100 ms of a change, until ctx ends. Name, At and Expires are filled in. While NATS
// is away nothing is sent and nothing is an error.
func (c *Conn) PublishStatus(ctx context.Context, status func() Status) error {
	return c.publishState(ctx, subjectStatus, StatusEvery, statusCheckEvery, nil, func() encoder {
		s := status()
		s.Name, s.Expires = c.identity.Name(), c.identity.Expires()
		return func(at time.Time) ([]byte, error) {
			s.At = at
			return json.Marshal(s)
		}
	})
}

// encoder encodes one state with the time it is told at.
type encoder func(at time.Time) ([]byte, error)

// publishState sends a state under our name every so often, after a change and
// when asked. A nil encoder is nothing to tell.
func (c *Conn) publishState(ctx context.Context, prefix string, every, check time.Duration, asked <-chan struct{}, state func() encoder) error {
	connected := c.nextConnect()
	var sent string
	var sentAt time.Time
	var before time.Duration // what the round before took
	for {
		begin := time.Now()
		if encode := state(); encode != nil {
			content, err := encode(time.Time{})
			if err != nil {
				return fmt.Errorf("encode %s: %w", prefix, err)
			}
			if now := time.Now(); c.Connected() && (string(content) != sent || now.Sub(sentAt) >= every) {
				body, err := encode(now)
				if err != nil {
					return fmt.Errorf("encode %s: %w", prefix, err)
				}
				if err := c.nc.Publish(member(prefix, c.identity.Name()), body); err != nil {
					c.onError(nil, nil, fmt.Errorf("publish %s: %w", prefix, err))
				}
				sent, sentAt = string(content), now
			}
		}
		cost := time.Since(begin)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-connected:
			connected, sent = c.nextConnect(), ""
		case <-asked:
			sent = ""
		// This is not CPU time: who had to wait for a processor must not be
		// silent for fifty times as long, and be taken for one that is gone.
		case <-time.After(min(max(check, statusCost*min(cost, before)), StatusEvery)):
		}
		before = cost
	}
}

// FollowStatus calls fn with every status until ctx ends. It is for the
// controller.
func (c *Conn) FollowStatus(ctx context.Context, fn func(Status)) error {
	return followState(ctx, c, subjectStatus, func(s Status) identity.Name { return s.Name }, fn)
}

// followState skips what is malformed or not about its sender.
func followState[T any](ctx context.Context, c *Conn, prefix string, about func(T) identity.Name, fn func(T)) error {
	msgs := make(chan *nats.Msg, statusQueue)
	sub, err := c.nc.ChanSubscribe(prefix+">", msgs)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case m := <-msgs:
			var s T
			if m.Header.Get("Nats-Stream") != "" {
				c.skip(m.Subject, errReflected)
				continue
			}
			if err := json.Unmarshal(m.Data, &s); err != nil {
				c.skip(m.Subject, err)
				continue
			}
			if name := about(s); member(prefix, name) != m.Subject {
				c.skip(m.Subject, fmt.Errorf("it is about %s", name))
				continue
			}
			fn(s)
		}
	}
}
