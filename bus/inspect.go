package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

// ErrInspect is the cause of an inspection that the node could not answer.
var ErrInspect = errors.New("container not inspected")

const (
	inspectWithin   = 30 * time.Second // an inspection whose context has no deadline
	inspectParallel = 4
	inspectQueue    = 64 // questions waiting; more are dropped and time out
)

// Inspect asks a node for one of its containers, by name or id. It is for the
// controller. The answer comes on a subject that only that node may publish.
func (c *Conn) Inspect(ctx context.Context, node, container string) (placement.Captured, error) {
	name := identity.Name{Role: identity.RoleNode, ID: node}
	if err := name.Check(); err != nil {
		return placement.Captured{}, err
	}
	if !c.Connected() {
		return placement.Captured{}, ErrNotConnected
	}
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, inspectWithin)
		defer cancel()
	}
	reply := member(subjectInspected, name) + "." + nats.NewInbox()[len(nats.InboxPrefix):]
	sub, err := c.nc.SubscribeSync(reply)
	if err != nil {
		return placement.Captured{}, err
	}
	defer sub.Unsubscribe()
	if err := c.nc.PublishRequest(member(subjectInspect, name), reply, []byte(container)); err != nil {
		return placement.Captured{}, fmt.Errorf("inspect %s on node %s: %w", container, node, err)
	}
	m, err := sub.NextMsgWithContext(ctx)
	if err != nil {
		return placement.Captured{}, fmt.Errorf("inspect %s: node %s did not answer: %w", container, node, err)
	}
	if m.Header.Get("Status") == "503" {
		return placement.Captured{}, fmt.Errorf("inspect %s: node %s did not answer: %w", container, node, nats.ErrNoResponders)
	}
	if text := m.Header.Get(errorHeader); text != "" {
		return placement.Captured{}, fmt.Errorf("%w: %s", ErrInspect, text)
	}
	var found placement.Captured
	if err := json.Unmarshal(m.Data, &found); err != nil {
		return placement.Captured{}, fmt.Errorf("inspect %s on node %s: %w", container, node, err)
	}
	if found.Node != node {
		return placement.Captured{}, fmt.Errorf("inspect %s on node %s: the answer is about node %q", container, node, found.Node)
	}
	return found, nil
}

// AnswerInspect answers Inspect with what fn finds, until ctx ends. Node is
// filled in. It is for nodes.
func (c *Conn) AnswerInspect(ctx context.Context, fn func(ctx context.Context, container string) (placement.Captured, error)) error {
	name := c.identity.Name()
	msgs := make(chan *nats.Msg, inspectQueue)
	sub, err := c.nc.ChanSubscribe(member(subjectInspect, name), msgs)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe()
	g, ctx := errgroup.WithContext(ctx)
	for range inspectParallel {
		g.Go(func() error {
			for {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case m := <-msgs:
					c.answerInspect(ctx, m, fn)
				}
			}
		})
	}
	return g.Wait()
}

func (c *Conn) answerInspect(ctx context.Context, m *nats.Msg, fn func(context.Context, string) (placement.Captured, error)) {
	name := c.identity.Name()
	// What the server reflects here has no such reply subject.
	if !strings.HasPrefix(m.Reply, member(subjectInspected, name)+".") || m.Header.Get("Nats-Stream") != "" {
		c.metrics.malformed.Inc()
		return
	}
	if len(m.Data) == 0 { // AskReport
		select {
		case c.asked <- struct{}{}:
		default:
		}
		return
	}
	ctx, cancel := context.WithTimeout(ctx, inspectWithin)
	defer cancel()
	out := nats.NewMsg(m.Reply)
	found, err := fn(ctx, string(m.Data))
	if err == nil {
		found.Node = name.ID
		out.Data, err = json.Marshal(found)
	}
	if err != nil {
		out.Data = nil
		out.Header.Set(errorHeader, strings.NewReplacer("\n", " ", "\r", " ").Replace(err.Error()))
	}
	if err := c.nc.PublishMsg(out); err != nil {
		c.logger.Warn("inspection not answered", "err", err)
	}
}
