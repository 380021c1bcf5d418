package enginetest

import (
	"strings"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/opfield/availability/identity"
)

// Traffic counts what is published on NATS.
type Traffic struct {
	mu    sync.Mutex
	kinds map[string]Count
}

// Count is a number of messages and their bytes.
type Count struct{ Messages, Bytes int }

// Listen begins to count everything that clients publish, in the accounts of
// the nodes and of the store, until the test ends.
func (c *Cluster) Listen() *Traffic {
	c.t.Helper()
	t := &Traffic{kinds: map[string]Count{}}
	for _, id := range []*identity.Identity{c.NATS.Identity, c.writer} {
		nc, err := nats.Connect(c.NATS.URL(), nats.Secure(id.ClientTLS(identity.ControllerName())), nats.CustomInboxPrefix("_INBOX.traffic"))
		c.must(err)
		c.t.Cleanup(nc.Close)
		account := "shared "
		if id == c.writer {
			account = "store "
		}
		_, err = nc.Subscribe(">", func(m *nats.Msg) { t.add(account+kindOf(m.Subject), m) })
		c.must(err)
		c.must(nc.Flush())
	}
	return t
}

func kindOf(subject string) string {
	parts := strings.Split(subject, ".")
	switch {
	case parts[0] == "$JS" || strings.HasPrefix(subject, "opfield.read"):
		return "requests"
	case strings.HasPrefix(parts[0], "_"):
		return "answers"
	case parts[0] == "$KV":
		return "writes"
	}
	return strings.Join(parts[:min(2, len(parts))], ".")
}

func (t *Traffic) add(kind string, m *nats.Msg) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.kinds[kind]
	t.kinds[kind] = Count{n.Messages + 1, n.Bytes + len(m.Subject) + len(m.Data)}
}

// Take returns what was counted by kind since the last call.
func (t *Traffic) Take() map[string]Count {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := t.kinds
	t.kinds = map[string]Count{}
	return out
}
