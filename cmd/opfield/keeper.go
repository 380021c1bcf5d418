package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
)

const (
	keepEvery  = 30 * time.Second
	keepAgain  = 300 * time.Millisecond // after an error
	keepWithin = 20 * time.Second
)

// keeper makes streams and buckets say what the CA knows: who is revoked and
// where relays listen. It compares and repairs, so nothing is ever lost.
type keeper struct {
	ca    *identity.CA
	main  *identity.Identity
	conn  *bus.Conn
	store *bus.Store
	log   *slog.Logger
	due   chan struct{} // holds one wake-up
	good  atomic.Bool   // the last round succeeded
}

func newKeeper(ca *identity.CA, main *identity.Identity, conn *bus.Conn, store *bus.Store, log *slog.Logger) *keeper {
	return &keeper{ca: ca, main: main, conn: conn, store: store, log: log, due: make(chan struct{}, 1)}
}

// wake asks for a round now. Revocations hold at this host at once.
func (k *keeper) wake() {
	if err := k.main.SetRevoked(k.ca.Revocations()); err != nil {
		k.log.Error("revocations not kept on disk", "err", err)
	}
	select {
	case k.due <- struct{}{}:
	default:
	}
}

// Run keeps until ctx ends.
func (k *keeper) Run(ctx context.Context) error {
	for {
		wait := keepEvery
		round, cancel := context.WithTimeout(ctx, keepWithin)
		err := k.round(round)
		cancel()
		if k.good.Store(err == nil); err != nil {
			wait = keepAgain
			if !errors.Is(err, bus.ErrNotConnected) && ctx.Err() == nil {
				k.log.Warn("streams not up to date yet", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-k.due:
		case <-time.After(wait):
		}
	}
}

// ready says whether streams and buckets are up to date.
func (k *keeper) ready() error {
	if !k.good.Load() {
		return errors.New("streams are not up to date")
	}
	return nil
}

func (k *keeper) round(ctx context.Context) error {
	if !k.conn.Connected() {
		return bus.ErrNotConnected
	}
	// A round that failed may mean that NATS lost its store.
	if !k.good.Load() {
		if err := errors.Join(bus.EnsureStreams(ctx, k.conn), k.store.Ensure(ctx)); err != nil {
			return err
		}
	}
	revoked := map[string]any{}
	for _, r := range k.ca.Revocations() {
		revoked[string(r.Name.Role)+"."+r.Name.ID] = r
	}
	relays := map[string]any{}
	for _, r := range relaysOf(k.ca) {
		relays[r.ID] = r
	}
	return errors.Join(k.keep(ctx, bus.BucketRevoked, revoked), k.keep(ctx, bus.BucketRelays, relays))
}

// keep makes a bucket hold exactly want, as JSON.
func (k *keeper) keep(ctx context.Context, bucket string, want map[string]any) error {
	stored, err := k.conn.ReadBucket(ctx, bucket)
	if err != nil {
		return err
	}
	var errs []error
	for key, v := range want {
		b, err := json.Marshal(v)
		if err != nil {
			return err
		}
		if !bytes.Equal(stored[key], b) {
			errs = append(errs, k.store.Put(ctx, bucket, key, b))
		}
	}
	for key := range stored {
		if _, ok := want[key]; !ok {
			errs = append(errs, k.store.Delete(ctx, bucket, key))
		}
	}
	return errors.Join(errs...)
}

// relaysOf returns where the relays listen that joined and are not revoked.
func relaysOf(ca *identity.CA) []identity.RelayAddress {
	out := []identity.RelayAddress{}
	for _, m := range ca.Members() {
		if m.Name.Role == identity.RoleRelay && !m.Revoked && m.Advertise != "" {
			out = append(out, identity.RelayAddress{ID: m.Name.ID, Addr: m.Advertise})
		}
	}
	return out
}
