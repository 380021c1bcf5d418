package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/opfield/availability/placement"
)

// ErrInvalidNodeEvent is the cause of every error about a node event.
var ErrInvalidNodeEvent = errors.New("invalid node event")

// NodeState says whether a node is there.
type NodeState string

// The states of a node.
const (
	NodeOnline  NodeState = "online"
	NodeOffline NodeState = "offline" // silent on NATS, and no relay holds its session
)

const (
	nodeEventType = "opfield.node.liveness.v1"
	maxNodeEvent  = 4 << 10
)

// NodeEvent is the controller's word on the liveness of a node.
type NodeEvent struct {
	Node   string    `json:"node"`
	State  NodeState `json:"state"`
	Since  time.Time `json:"since"`  // for people; never compared
	Number uint64    `json:"number"` // grows with every event of the node
	Reason string    `json:"reason,omitempty"`
}

type nodeEnvelope struct {
	SpecVersion     string    `json:"specversion"`
	ID              string    `json:"id"`
	Source          string    `json:"source"`
	Type            string    `json:"type"`
	Subject         string    `json:"subject"`
	Time            time.Time `json:"time"`
	DataContentType string    `json:"datacontenttype"`
	Data            NodeEvent `json:"data"`
}

func (e NodeEvent) check() error {
	if err := placement.CheckName(e.Node); err != nil {
		return fmt.Errorf("%w: node: %w", ErrInvalidNodeEvent, err)
	}
	if e.State != NodeOnline && e.State != NodeOffline {
		return fmt.Errorf("%w: state: want online or offline", ErrInvalidNodeEvent)
	}
	return nil
}

// Marshal encodes the event as a CloudEvents 1.0 JSON document.
func (e NodeEvent) Marshal() ([]byte, error) {
	if err := e.check(); err != nil {
		return nil, err
	}
	return json.Marshal(nodeEnvelope{
		SpecVersion: "1.0", ID: fmt.Sprintf("%s.%d", e.Node, e.Number), Source: "/opfield/controller",
		Type: nodeEventType, Subject: e.Node, Time: e.Since.UTC(), DataContentType: "application/json", Data: e,
	})
}

// UnmarshalNodeEvent decodes what Marshal makes.
func UnmarshalNodeEvent(b []byte) (NodeEvent, error) {
	var env nodeEnvelope
	if len(b) > maxNodeEvent {
		return NodeEvent{}, fmt.Errorf("%w: %d bytes, at most %d are allowed", ErrInvalidNodeEvent, len(b), maxNodeEvent)
	}
	if err := json.Unmarshal(b, &env); err != nil {
		return NodeEvent{}, fmt.Errorf("%w: %w", ErrInvalidNodeEvent, err)
	}
	if env.SpecVersion != "1.0" || env.Type != nodeEventType {
		return NodeEvent{}, fmt.Errorf("%w: type %q, want %q", ErrInvalidNodeEvent, env.Type, nodeEventType)
	}
	return env.Data, env.Data.check()
}

// FollowNodes calls fn with the last event of every node and then with every
// change, like FollowPlacements.
func (c *Conn) FollowNodes(ctx context.Context, fn func(NodeEvent)) error {
	deliver := func(subject string, data []byte) {
		e, err := UnmarshalNodeEvent(data)
		if err == nil && subjectNodes+e.Node != subject {
			err = fmt.Errorf("%w: it is about %s", ErrInvalidNodeEvent, e.Node)
		}
		if err != nil {
			c.skip(subject, err)
			return
		}
		fn(e)
	}
	return c.follow(ctx, feed{
		stream: streamNodes, filter: subjectNodes + ">", live: subjectNodes + ">",
		onLive: func(m *nats.Msg) bool {
			if m.Header.Get("Nats-Stream") != "" {
				c.skip(m.Subject, errReflected)
			} else {
				deliver(m.Subject, m.Data)
			}
			return false
		},
		onList: func(msgs []stored, _ bool) {
			for _, m := range msgs {
				deliver(m.subject, m.data)
			}
		},
	})
}
