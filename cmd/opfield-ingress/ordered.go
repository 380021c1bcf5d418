package main

import (
	"context"
	"net/netip"
	"sync"

	"github.com/opfield/availability/ingress/endpoint"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// ordered are the endpoints, knowing whether they have had orders yet.
type ordered struct {
	set   *endpoint.Set
	once  sync.Once
	first chan struct{}
}

func newOrdered(set *endpoint.Set) *ordered {
	return &ordered{set: set, first: make(chan struct{})}
}

// Apply implements ingress.Endpoints.
func (o *ordered) Apply(orders []upstream.Order, addr func(placement.LinkID) netip.Addr) {
	o.set.Apply(orders, addr)
	o.once.Do(func() { close(o.first) })
}

func (o *ordered) wait(ctx context.Context) {
	select {
	case <-o.first:
	case <-ctx.Done():
	}
}

// Update implements ingress.Endpoints.
func (o *ordered) Update(orders []upstream.Order) { o.set.Update(orders) }
