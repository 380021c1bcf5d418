package bus

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/opfield/availability/identity"
)

// FollowBucket calls fn with all keys and values when the bucket was first
// read and after each change, until ctx ends. Without NATS it is not called,
// so what the caller knows stays. The map belongs to fn.
func (c *Conn) FollowBucket(ctx context.Context, bucket string, fn func(map[string][]byte)) error {
	prefix := "$KV." + bucket + "."
	state := map[string][]byte{}
	known := false
	return c.follow(ctx, feed{
		stream: kvStream(bucket), filter: prefix + ">", live: subjectChanged + bucket + ".>",
		onLive: func(*nats.Msg) bool { return true },
		onList: func(msgs []stored, full bool) {
			next := map[string][]byte{}
			if !full {
				next = maps.Clone(state)
			}
			for _, m := range msgs {
				key := strings.TrimPrefix(m.subject, prefix)
				if m.deleted {
					delete(next, key)
				} else {
					next[key] = m.data
				}
			}
			if known && maps.EqualFunc(state, next, bytes.Equal) {
				return
			}
			known, state = true, next
			fn(maps.Clone(next))
		},
	})
}

// FollowRevocations keeps the identity's list of revocations up to date until
// ctx ends.
func (c *Conn) FollowRevocations(ctx context.Context) error {
	return c.FollowBucket(ctx, BucketRevoked, func(m map[string][]byte) {
		var list []identity.Revocation
		for key, value := range m {
			var r identity.Revocation
			if err := json.Unmarshal(value, &r); err != nil || r.Name.Check() != nil {
				c.skip(BucketRevoked+"/"+key, err)
				continue
			}
			list = append(list, r)
		}
		if err := c.identity.SetRevoked(list); err != nil {
			c.logger.Error("revocations not kept on disk", "err", err)
		}
	})
}

// ReadBucket returns all keys and values as they are now.
func (c *Conn) ReadBucket(ctx context.Context, bucket string) (map[string][]byte, error) {
	prefix := "$KV." + bucket + "."
	msgs, _, err := c.list(ctx, kvStream(bucket), prefix+">", 1)
	if err != nil {
		return nil, err
	}
	out := map[string][]byte{}
	for _, m := range msgs {
		if key := strings.TrimPrefix(m.subject, prefix); !m.deleted {
			out[key] = m.data
		}
	}
	return out, nil
}
