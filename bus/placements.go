package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/opfield/availability/placement"
)

// ErrNotStored is the cause of a publish that JetStream refused.
var ErrNotStored = errors.New("event not stored")

const removedKept = 24 * time.Hour // a removed placement's last event

// PublishPlacement sends an event and waits until it is stored. Subscribers
// have it even when the store does not answer.
func (c *Conn) PublishPlacement(ctx context.Context, e placement.Event) error {
	data, err := e.Marshal()
	if err != nil {
		return err
	}
	c.remember(e, data)
	answer, err := c.request(ctx, placementMessage(e.ID(), data, e.State == placement.StateRemoved))
	if err != nil {
		return err
	}
	return ackError(answer.Data)
}

func placementMessage(id placement.ID, data []byte, removed bool) *nats.Msg {
	msg := nats.NewMsg(id.Subject())
	msg.Data = data
	if removed {
		msg.Header.Set("Nats-TTL", removedKept.String())
	}
	return msg
}

func ackError(b []byte) error {
	var ack struct {
		Stream string `json:"stream"`
		Error  *struct {
			Description string `json:"description"`
		} `json:"error"`
	}
	if err := json.Unmarshal(b, &ack); err != nil {
		return fmt.Errorf("%w: %w", ErrNotStored, err)
	}
	if ack.Error != nil {
		return fmt.Errorf("%w: %s", ErrNotStored, ack.Error.Description)
	}
	if ack.Stream == "" {
		return fmt.Errorf("%w: no stream took it", ErrNotStored)
	}
	return nil
}

// decodePlacement accepts an event only on the subject of its placement.
func decodePlacement(subject string, data []byte) (placement.Event, error) {
	e, err := placement.UnmarshalEvent(data)
	if err != nil {
		return placement.Event{}, err
	}
	if e.ID().Subject() != subject {
		return placement.Event{}, fmt.Errorf("%w: it is about %s", placement.ErrInvalidEvent, e.ID())
	}
	return e, nil
}

// errReflected is given for a stored message that was sent again as if new.
var errReflected = errors.New("a copy of a stored message")

// FollowPlacements calls fn with the present state and then with every
// change, until ctx ends; a lost connection is resumed with the present
// state. Events may repeat and, around a list, an older one may follow a
// newer: compare placement.Order. fn is called from one goroutine.
func (c *Conn) FollowPlacements(ctx context.Context, fn func(placement.Event)) error {
	deliver := func(subject string, data []byte) {
		e, err := decodePlacement(subject, data)
		if err != nil {
			c.skip(subject, err)
			return
		}
		fn(e)
	}
	return c.follow(ctx, feed{
		stream: streamPlacements, filter: subjectPlacements, live: subjectPlacements,
		onLive: func(m *nats.Msg) bool {
			if m.Header.Get("Nats-Stream") != "" {
				c.skip(m.Subject, errReflected)
				return false
			}
			deliver(m.Subject, m.Data)
			return false
		},
		onList: func(msgs []stored, _ bool) {
			for _, m := range msgs {
				if !m.deleted {
					deliver(m.subject, m.data)
				}
			}
		},
	})
}

// LastPlacement returns the last stored event of a placement of this node.
// The controller answers; a node has no right to read the stream itself,
// because the answer to such a read goes to any subject the reader names.
func (c *Conn) LastPlacement(ctx context.Context, id placement.ID) (placement.Event, bool, error) {
	msg := nats.NewMsg(member(subjectLast, c.identity.Name()))
	msg.Data = []byte(id.Workload)
	answer, err := c.request(ctx, msg)
	if err != nil {
		return placement.Event{}, false, err
	}
	if text := answer.Header.Get(errorHeader); text != "" {
		return placement.Event{}, false, fmt.Errorf("last event of %s: %s", id, text)
	}
	if len(answer.Data) == 0 {
		return placement.Event{}, false, nil
	}
	e, err := decodePlacement(id.Subject(), answer.Data)
	return e, err == nil, err
}

// AnswerLast answers LastPlacement for all nodes until ctx ends. It is for
// the controller.
func (c *Conn) AnswerLast(ctx context.Context) error {
	return c.serve(ctx, subjectLast, func(ctx context.Context, r request) ([]byte, error) {
		id := placement.ID{Workload: strings.TrimSpace(string(r.data)), Node: r.from.ID}
		if err := id.Check(); err != nil {
			return nil, err
		}
		msgs, _, err := c.list(ctx, streamPlacements, id.Subject(), 1)
		if err != nil || len(msgs) == 0 {
			return nil, err
		}
		if _, err := decodePlacement(id.Subject(), msgs[len(msgs)-1].data); err != nil {
			return nil, nil // unusable: as if there were none
		}
		return msgs[len(msgs)-1].data, nil
	})
}
