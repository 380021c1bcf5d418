package bus

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/opfield/availability/placement"
)

const (
	desiredWithin   = 3 * time.Second // one record
	desiredParallel = 16
	desiredQueue    = 256 // announcements; they only say that there is something to read
)

// desiredTiming says how often a node reads although nothing was announced.
type desiredTiming struct {
	index time.Duration // the index, and the records of another revision than is known
	whole time.Duration // every record
}

func defaultDesiredTiming() desiredTiming {
	return desiredTiming{index: relistEvery, whole: 10 * time.Minute}
}

var (
	errNoDesired    = errors.New("nothing is desired of this node yet")
	errStaleDesired = errors.New("the record is older than its index")
)

// KeepDesired makes the records of a node exactly want, by workload: what
// differs is written first, then the index, then what is not wanted any more
// is deleted. So a node that reads in between never misses a record.
func (s *Store) KeepDesired(ctx context.Context, node string, want map[string]placement.Desired) error {
	if err := placement.CheckName(node); err != nil {
		return fmt.Errorf("desired placements of a node: %w", err)
	}
	index := map[string]uint64{}
	next := map[string][]byte{}
	for workload, d := range want {
		if err := d.Check(); err != nil {
			return err
		}
		if d.ID() != (placement.ID{Workload: workload, Node: node}) {
			return fmt.Errorf("%w: %s under workload %s of node %s", placement.ErrInvalidDesired, d.ID(), workload, node)
		}
		data, err := json.Marshal(d)
		if err != nil {
			return err
		}
		index[workload], next[node+"."+workload] = d.Revision, data
	}
	list, err := json.Marshal(index) // sorted by key
	if err != nil {
		return err
	}
	have, err := s.desired(ctx, node)
	if err != nil {
		return err
	}
	g, writing := errgroup.WithContext(ctx)
	g.SetLimit(desiredParallel)
	for key := range next {
		if !bytes.Equal(have[key], next[key]) {
			g.Go(func() error { return s.Put(writing, BucketDesired, key, next[key]) })
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if !bytes.Equal(have[node], list) {
		if err := s.Put(ctx, BucketDesired, node, list); err != nil {
			return err
		}
	}
	for _, key := range slices.Sorted(maps.Keys(have)) {
		if _, wanted := next[key]; !wanted && key != node {
			if err := s.Delete(ctx, BucketDesired, key); err != nil {
				return err
			}
		}
	}
	return nil
}

// desired reads the index and the records of a node.
func (s *Store) desired(ctx context.Context, node string) (map[string][]byte, error) {
	have := map[string][]byte{}
	for _, key := range []string{node, node + ".>"} {
		msgs, _, err := s.conn.list(ctx, kvStream(BucketDesired), kvSubject(BucketDesired, key), 1)
		if err != nil {
			return nil, err
		}
		for _, m := range msgs {
			if !m.deleted {
				have[strings.TrimPrefix(m.subject, kvSubject(BucketDesired, ""))] = m.data
			}
		}
	}
	return have, nil
}

// FollowDesired calls fn with everything that is desired of this node, by
// workload: first when the index and every record were read, then after each
// change, until ctx ends. Without NATS, or before the controller wrote an
// index, it is not called, so what the caller knows stays. A record that cannot
// be read is given as it was before, or empty: nothing new is known of it, and
// it is not gone. It is for nodes.
func (c *Conn) FollowDesired(ctx context.Context, fn func(map[string]placement.Desired)) error {
	node := c.identity.Name().ID
	changes := make(chan *nats.Msg, desiredQueue)
	for _, key := range []string{node, node + ".*"} {
		sub, err := c.nc.ChanSubscribe(subjectChanged+BucketDesired+"."+key, changes)
		if err != nil {
			return err
		}
		defer sub.Unsubscribe()
	}
	var known map[string]placement.Desired
	var raw map[string][]byte
	due := time.NewTimer(0)
	defer due.Stop()
	whole := true // read every record, not only those of another revision
	index := time.NewTicker(c.desired.index)
	defer index.Stop()
	full := time.NewTicker(c.desired.whole)
	defer full.Stop()
	connected := c.nextConnect()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changes:
			due.Reset(coalesceFor)
		case <-connected:
			connected = c.nextConnect()
			whole = true
			due.Reset(0)
		case <-index.C:
			due.Reset(0)
		case <-full.C:
			whole = true
			due.Reset(0)
		case <-due.C:
			next, data, err := c.readDesired(ctx, whole, known, raw)
			switch {
			case errors.Is(err, errNoDesired):
				continue
			case err != nil:
				c.logger.Debug("read what is desired again later", "err", err)
				due.Reset(relistAfter)
				continue
			}
			whole = false
			if known != nil && maps.EqualFunc(raw, data, bytes.Equal) {
				continue
			}
			known, raw = next, data
			fn(maps.Clone(next))
		}
	}
}

// readDesired reads the index and the records that are not known in its
// revision, or the whole. A malformed record is left as it was known.
func (c *Conn) readDesired(ctx context.Context, whole bool, known map[string]placement.Desired, raw map[string][]byte) (map[string]placement.Desired, map[string][]byte, error) {
	node := c.identity.Name().ID
	data, found, err := c.getDesired(ctx, node)
	if err != nil {
		return nil, nil, err
	}
	if !found {
		return nil, nil, errNoDesired
	}
	var index map[string]uint64
	if err := json.Unmarshal(data, &index); err != nil {
		return nil, nil, fmt.Errorf("index of desired placements: %w", err)
	}
	type answer struct {
		desired placement.Desired
		data    []byte
		usable  bool
	}
	workloads := slices.Sorted(maps.Keys(index))
	answers := make([]answer, len(workloads))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(desiredParallel)
	for i, workload := range workloads {
		if d, ok := known[workload]; ok && d.Revision == index[workload] && !whole {
			answers[i] = answer{d, raw[workload], true}
			continue
		}
		g.Go(func() error {
			key := node + "." + workload
			if err := placement.CheckName(workload); err != nil {
				c.skip(kvSubject(BucketDesired, key), err)
				return nil
			}
			data, found, err := c.getDesired(ctx, key)
			if err != nil {
				return err
			}
			var d placement.Desired
			if !found {
				return fmt.Errorf("%s: %w", key, errStaleDesired)
			}
			err = json.Unmarshal(data, &d)
			if err == nil {
				err = d.Check()
			}
			if err == nil && d.ID() != (placement.ID{Workload: workload, Node: node}) {
				err = fmt.Errorf("%w: it is about %s", placement.ErrInvalidDesired, d.ID())
			}
			if err != nil {
				c.skip(kvSubject(BucketDesired, key), err)
				return nil
			}
			if d.Revision < index[workload] {
				return fmt.Errorf("%s: %w", key, errStaleDesired)
			}
			answers[i] = answer{d, data, true}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, nil, err
	}
	next, nextRaw := map[string]placement.Desired{}, map[string][]byte{}
	for i, a := range answers {
		if a.usable {
			next[workloads[i]], nextRaw[workloads[i]] = a.desired, a.data
		} else { // what was never known is desired too, whatever it is
			next[workloads[i]], nextRaw[workloads[i]] = known[workloads[i]], raw[workloads[i]]
		}
	}
	return next, nextRaw, nil
}

// getDesired reads one key.
func (c *Conn) getDesired(ctx context.Context, key string) (data []byte, found bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, desiredWithin)
	defer cancel()
	m, err := c.request(ctx, nats.NewMsg(readDesired(key)))
	if err != nil {
		return nil, false, err
	}
	if status := m.Header.Get("Status"); status == "404" {
		return nil, false, nil
	} else if status != "" {
		return nil, false, fmt.Errorf("%w: %s %s", errPage, status, m.Header.Get("Description"))
	}
	s, _, err := fromPage(m)
	if err != nil {
		return nil, false, err
	}
	if s.subject != kvSubject(BucketDesired, key) {
		return nil, false, fmt.Errorf("%w: asked for %s, got %s", errPage, key, s.subject)
	}
	return s.data, !s.deleted, nil
}
