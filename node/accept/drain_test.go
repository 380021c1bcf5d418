package accept

import (
	"crypto/tls"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

// Each placement has its own drain interval. // SET-1, ROL-1
func TestAcceptor_DrainOfAPlacement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(Config{TLS: &tls.Config{}, Drain: 30 * time.Second, DrainOf: func(id placement.ID) (time.Duration, bool) {
			return 5 * time.Second, id.Workload == "web"
		}})
		record := func(workload string, role placement.Role) securelink.Record {
			return securelink.Record{
				Link: placement.LinkID{Placement: placement.ID{Workload: workload, Node: "a"}, Port: 80}, Protocol: placement.ProtocolHTTP,
				Role: role, State: placement.StateRunning, Ready: true,
			}
		}
		web, shop := record("web", placement.RoleServing), record("shop", placement.RoleServing)
		a.Apply([]securelink.Record{web, shop})
		require.True(t, a.add(&stream{link: web.Link}))
		st := &stream{link: shop.Link}
		require.True(t, a.add(st))
		require.Equal(t, 1, a.StreamsOf(web.Link.Placement))
		require.Zero(t, a.StreamsOf(placement.ID{Workload: "web", Node: "b"}))
		a.remove(&stream{link: web.Link})
		delete(a.streams, web.Link) // nothing to nudge in a bubble
		delete(a.streams, shop.Link)

		now := time.Now()
		a.Apply([]securelink.Record{record("web", placement.RoleDraining), record("shop", placement.RoleDraining)})
		require.Equal(t, now.Add(5*time.Second), a.drains[web.Link])
		require.Equal(t, now.Add(30*time.Second), a.drains[shop.Link])
		require.False(t, a.add(&stream{link: web.Link}), "no new stream")
	})
}
