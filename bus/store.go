package bus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/opfield/availability/placement"
)

const (
	deletedKept   = 24 * time.Hour // the marker of a deleted key
	maxBucket     = 512 << 20
	maxPlacements = 1 << 30
	maxNodes      = 64 << 20
)

// Store writes the buckets and the node events. Only the controller has the
// identity for it.
type Store struct {
	conn *Conn // fixed
	js   jetstream.JetStream

	mu      sync.Mutex
	buckets map[string]jetstream.KeyValue // guarded by mu; opened
}

// OpenStore begins to connect like Connect; the identity is that of
// identity.StoreName.
func OpenStore(cfg Config) (*Store, error) {
	c, err := Connect(cfg)
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(c.nc)
	if err != nil {
		c.Close()
		return nil, err
	}
	return &Store{conn: c, js: js, buckets: map[string]jetstream.KeyValue{}}, nil
}

// Close ends the connection.
func (s *Store) Close() { s.conn.Close() }

// EnsureStreams creates the stream of health events, or updates it.
func EnsureStreams(ctx context.Context, c *Conn) error {
	js, err := jetstream.New(c.nc)
	if err != nil {
		return err
	}
	_, err = js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name:              streamPlacements,
		Description:       "the last health event of every placement",
		Subjects:          []string{placement.SubjectPrefix + "*.*"},
		MaxMsgsPerSubject: 1,
		MaxBytes:          maxPlacements,
		MaxMsgSize:        placement.MaxEventSize + 1<<10, // headers
		Storage:           jetstream.FileStorage,
		Discard:           jetstream.DiscardOld,
		AllowDirect:       true,
		AllowMsgTTL:       true,
		AllowRollup:       false, // one header would erase what others wrote
		DenyDelete:        true,
		DenyPurge:         true,
	})
	if err != nil {
		return fmt.Errorf("create stream %s: %w", streamPlacements, err)
	}
	return nil
}

// Ensure creates the buckets and the streams of node and audit events.
func (s *Store) Ensure(ctx context.Context) error {
	for _, b := range Buckets() {
		_, err := s.js.CreateOrUpdateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket:         b,
			History:        1,
			MaxBytes:       maxBucket,
			Storage:        jetstream.FileStorage,
			LimitMarkerTTL: deletedKept,
			RePublish:      &jetstream.RePublish{Source: "$KV." + b + ".>", Destination: subjectChanged + b + ".>", HeadersOnly: true},
		})
		if err != nil {
			return fmt.Errorf("create bucket %s: %w", b, err)
		}
	}
	_, err := s.js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name:              streamNodes,
		Description:       "the last liveness event of every node",
		Subjects:          []string{subjectNodes + "*"},
		MaxMsgsPerSubject: 1,
		MaxBytes:          maxNodes,
		Storage:           jetstream.FileStorage,
		AllowDirect:       true,
	})
	if err != nil {
		return fmt.Errorf("create stream %s: %w", streamNodes, err)
	}
	return s.ensureAudit(ctx)
}

// bucket opens a bucket once: opening asks the server about its stream.
func (s *Store) bucket(ctx context.Context, name string) (jetstream.KeyValue, error) {
	s.mu.Lock()
	kv, open := s.buckets[name]
	s.mu.Unlock()
	if open {
		return kv, nil
	}
	kv, err := s.js.KeyValue(ctx, name)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buckets[name] = kv
	return kv, nil
}

// Put writes a key.
func (s *Store) Put(ctx context.Context, bucket, key string, value []byte) error {
	kv, err := s.bucket(ctx, bucket)
	if err == nil {
		_, err = kv.Put(ctx, key, value)
	}
	if err != nil {
		return fmt.Errorf("write %s/%s: %w", bucket, key, err)
	}
	return nil
}

// ErrConflict is the cause of a Swap that was not made because the key was
// changed by somebody else meanwhile.
var ErrConflict = errors.New("it was changed meanwhile")

// Entry is a value with its revision.
type Entry struct {
	Value    []byte
	Revision uint64
}

// Read returns every key of a bucket as it is now.
func (s *Store) Read(ctx context.Context, bucket string) (map[string]Entry, error) {
	prefix := "$KV." + bucket + "."
	msgs, _, err := s.conn.list(ctx, kvStream(bucket), prefix+">", 1)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", bucket, err)
	}
	out := map[string]Entry{}
	for _, m := range msgs {
		if !m.deleted {
			out[strings.TrimPrefix(m.subject, prefix)] = Entry{Value: m.data, Revision: m.sequence}
		}
	}
	return out, nil
}

// Swap writes a key if its revision is still the given one; zero means that
// there is no such key. It returns the new revision. After an error that is
// not ErrConflict it is not known whether the value was written.
func (s *Store) Swap(ctx context.Context, bucket, key string, value []byte, revision uint64) (uint64, error) {
	kv, err := s.bucket(ctx, bucket)
	if err != nil {
		return 0, fmt.Errorf("write %s/%s: %w", bucket, key, err)
	}
	if revision == 0 {
		revision, err = kv.Create(ctx, key, value)
	} else {
		revision, err = kv.Update(ctx, key, value, revision)
	}
	switch {
	case errors.Is(err, jetstream.ErrKeyRevisionMismatch), errors.Is(err, jetstream.ErrKeyExists):
		return 0, fmt.Errorf("write %s/%s: %w", bucket, key, ErrConflict)
	case err != nil:
		return 0, fmt.Errorf("write %s/%s: %w", bucket, key, err)
	}
	return revision, nil
}

// Delete removes a key; one that does not exist is no error.
func (s *Store) Delete(ctx context.Context, bucket, key string) error {
	kv, err := s.bucket(ctx, bucket)
	if err == nil {
		err = kv.Purge(ctx, key, jetstream.PurgeTTL(deletedKept))
	}
	if err != nil {
		return fmt.Errorf("delete %s/%s: %w", bucket, key, err)
	}
	return nil
}

// PublishNode stores and announces the liveness of a node.
func (s *Store) PublishNode(ctx context.Context, e NodeEvent) error {
	data, err := e.Marshal()
	if err != nil {
		return err
	}
	msg := nats.NewMsg(subjectNodes + e.Node)
	msg.Data = data
	if _, err := s.js.PublishMsg(ctx, msg); err != nil {
		return fmt.Errorf("publish liveness of node %s: %w", e.Node, err)
	}
	return nil
}
