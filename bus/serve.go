package bus

import (
	"context"
	"strings"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/identity"
)

const (
	errorHeader   = "Opfield-Error"
	serveQueue    = 1024 // requests waiting; more are dropped and time out
	serveParallel = 4
)

// request is what one identity asks of the controller.
type request struct {
	from identity.Name // from the subject, which NATS permissions protect
	data []byte
}

// importedReply begins the reply subject of a request from another account.
// The server makes it, and refuses it from clients.
const importedReply = "_R_."

// serve answers requests until ctx ends. It answers only to the private inbox
// of the asking identity, or into the asker's own account: the answer is sent
// with our rights, so any other reply subject would lend them to the asker.
func (c *Conn) serve(ctx context.Context, prefix string, answer func(context.Context, request) ([]byte, error)) error {
	msgs := make(chan *nats.Msg, serveQueue)
	sub, err := c.nc.ChanSubscribe(prefix+">", msgs)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe()
	g, ctx := errgroup.WithContext(ctx)
	for range serveParallel {
		g.Go(func() error {
			for {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case m := <-msgs:
					c.answerOne(ctx, prefix, m, answer)
				}
			}
		})
	}
	return g.Wait()
}

func (c *Conn) answerOne(ctx context.Context, prefix string, m *nats.Msg, answer func(context.Context, request) ([]byte, error)) {
	from, err := memberOf(prefix, m.Subject)
	if err != nil || !strings.HasPrefix(m.Reply, inboxPrefix(from)+".") && !strings.HasPrefix(m.Reply, importedReply) {
		c.metrics.malformed.Inc()
		return
	}
	out := nats.NewMsg(m.Reply)
	if out.Data, err = answer(ctx, request{from: from, data: m.Data}); err != nil {
		out.Header.Set(errorHeader, strings.ReplaceAll(err.Error(), "\n", " "))
		c.logger.Warn("request refused", "identity", from.String(), "subject", m.Subject, "err", err)
	}
	if err := c.nc.PublishMsg(out); err != nil {
		c.logger.Warn("answer not sent", "identity", from.String(), "err", err)
	}
}
