package ingress

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/opfield/availability/ingress/apply"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

func testLink(n int) placement.LinkID {
	return placement.LinkID{Placement: placement.ID{Workload: fmt.Sprintf("w%d", n), Node: "a"}, Port: 80}
}

// An address never changes hands within reuseAfter, over restarts too.
func TestAddressBook_NeverReused(t *testing.T) { // LNK-1
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1_800_000_000, 0)
		b, err := newAddressBook(nil, now)
		if err != nil {
			t.Fatal(err)
		}
		last := map[netip.Addr]placement.LinkID{}
		used := map[netip.Addr]time.Time{}
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			var links []placement.LinkID
			for n := range 6 {
				if rapid.Bool().Draw(t, "exists") {
					links = append(links, testLink(n))
				}
			}
			b.update(links, now)
			for _, id := range links {
				a, ok := b.get(id)
				if !ok || !validAddress(a) {
					t.Fatalf("%s has address %s", id, a)
				}
				if other, ok := last[a]; ok && other != id && now.Sub(used[a]) < reuseAfter {
					t.Fatalf("%s went from %s to %s after %s", a, other, id, now.Sub(used[a]))
				}
				last[a], used[a] = id, now
			}
			now = now.Add(rapid.SampledFrom([]time.Duration{time.Second, time.Hour, 25 * time.Hour}).Draw(t, "wait"))
			if rapid.Bool().Draw(t, "restart") {
				text, err := b.encode()
				if err != nil {
					t.Fatal(err)
				}
				before := b.byLink
				if b, err = newAddressBook(text, now); err != nil {
					t.Fatal(err)
				}
				if fmt.Sprint(before) != fmt.Sprint(b.byLink) {
					t.Fatal("a restart changed addresses")
				}
			}
		}
	})
}

func TestCompare(t *testing.T) { // RTE-8
	a, b, c := testLink(1), testLink(2), testLink(3)
	base := desired{version: 1, services: []upstream.Service{{Workload: "w", Port: 80, Open: []placement.LinkID{a}, Others: []placement.LinkID{b}}}}
	with := func(open, others []placement.LinkID) desired {
		return desired{version: 1, services: []upstream.Service{{Workload: "w", Port: 80, Open: open, Others: others}}}
	}
	no, yes := map[string]bool{"v": true}, map[string]bool{"w": true}
	require.Equal(t, apply.None, compare(base, base, no))
	require.Equal(t, apply.Prompt, compare(base, desired{version: 2}, no), "a route")
	require.Equal(t, apply.Quiet, compare(base, with([]placement.LinkID{a, b}, nil), no), "opened")
	require.Equal(t, apply.Quiet, compare(base, with([]placement.LinkID{a}, nil), no), "removed")
	require.Equal(t, apply.Prompt, compare(base, with([]placement.LinkID{a}, []placement.LinkID{b, c}), no), "new placement")
	require.Equal(t, apply.Quiet, compare(base, with([]placement.LinkID{a}, []placement.LinkID{b, c}), yes), "new placement of a planned move")
}
