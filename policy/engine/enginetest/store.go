package enginetest

import (
	"context"
	"sync"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy/engine"
)

var _ engine.Store = (*Store)(nil)

// Write is one call that writes.
type Write struct {
	Call     string // "Swap", "Put", "Delete" or "KeepDesired"
	Bucket   string
	Key      string // the node for KeepDesired
	Revision uint64 // of Swap: expected
}

// Store is a real store whose writes a test can see, and spoil.
type Store struct {
	*bus.Store

	mu     sync.Mutex
	before func(Write) error
	after  func(Write) error
	writes int
}

// Before sets what is asked before each write: an error is returned instead
// of writing.
func (s *Store) Before(fn func(Write) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = fn
}

// After sets what is asked after each write that was made: an error is
// returned although the write was made.
func (s *Store) After(fn func(Write) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.after = fn
}

// Writes returns how many writes were asked for.
func (s *Store) Writes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writes
}

func (s *Store) write(w Write, do func() error) error {
	s.mu.Lock()
	before, after := s.before, s.after
	s.writes++
	s.mu.Unlock()
	if before != nil {
		if err := before(w); err != nil {
			return err
		}
	}
	if err := do(); err != nil {
		return err
	}
	if after != nil {
		return after(w)
	}
	return nil
}

// Swap writes with compare-and-set.
func (s *Store) Swap(ctx context.Context, bucket, key string, value []byte, revision uint64) (next uint64, err error) {
	err = s.write(Write{"Swap", bucket, key, revision}, func() (err error) {
		next, err = s.Store.Swap(ctx, bucket, key, value, revision)
		return err
	})
	if err != nil {
		return 0, err
	}
	return next, nil
}

// Put writes.
func (s *Store) Put(ctx context.Context, bucket, key string, value []byte) error {
	return s.write(Write{"Put", bucket, key, 0}, func() error { return s.Store.Put(ctx, bucket, key, value) })
}

// Delete deletes.
func (s *Store) Delete(ctx context.Context, bucket, key string) error {
	return s.write(Write{"Delete", bucket, key, 0}, func() error { return s.Store.Delete(ctx, bucket, key) })
}

// KeepDesired makes the records of a node what is wanted.
func (s *Store) KeepDesired(ctx context.Context, node string, want map[string]placement.Desired) error {
	return s.write(Write{"KeepDesired", bus.BucketDesired, node, 0}, func() error { return s.Store.KeepDesired(ctx, node, want) })
}
