package bus_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
)

func desired(workload, node string, revision uint64) placement.Desired {
	return placement.Desired{
		Workload: workload, Node: node, Kind: placement.KindContainer, Revision: revision, Generation: 1,
		Want: placement.WantServing, Container: workload, Ports: []placement.Port{}, Spec: json.RawMessage(`{"env":["SECRET=1"]}`),
	}
}

// wanted is what FollowDesired said last.
type wanted struct {
	mu    sync.Mutex
	calls int
	all   map[string]placement.Desired
}

func (w *wanted) set(all map[string]placement.Desired) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = all
	w.calls++
}

func (w *wanted) is(revisions map[string]uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.all) != len(revisions) || w.calls == 0 {
		return false
	}
	for workload, revision := range revisions {
		if w.all[workload].Revision != revision {
			return false
		}
	}
	return true
}

func TestDesired_FollowsItsOwnOnly(t *testing.T) { // SEC-2
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	node := srv.Conn(t, ca.Identity(t, identity.RoleNode, "a"))
	var seen wanted
	bustest.Go(t, func(ctx context.Context) error { return node.FollowDesired(ctx, seen.set) })
	keep := func(node string, all ...placement.Desired) {
		t.Helper()
		want := map[string]placement.Desired{}
		for _, d := range all {
			want[d.Workload] = d
		}
		require.NoError(t, srv.Store.KeepDesired(t.Context(), node, want))
	}
	keep("a-b", desired("foreign", "a-b", 1)) // begins with the same letters
	keep("b", desired("foreign", "b", 1))
	keep("a", desired("web", "a", 1), desired("shop", "a", 4))
	require.Eventually(t, func() bool { return seen.is(map[string]uint64{"web": 1, "shop": 4}) }, soon, poll)
	require.JSONEq(t, `{"env":["SECRET=1"]}`, string(seen.all["web"].Spec))

	begin := time.Now()
	keep("a", desired("web", "a", 2), desired("shop", "a", 4))
	require.Eventually(t, func() bool { return seen.is(map[string]uint64{"web": 2, "shop": 4}) }, soon, poll)
	require.Less(t, time.Since(begin), time.Second, "it was announced, not found by the repair")
	keep("a", desired("shop", "a", 5))
	require.Eventually(t, func() bool { return seen.is(map[string]uint64{"shop": 5}) }, soon, poll)
	all, err := srv.Controller.ReadBucket(t.Context(), bus.BucketDesired)
	require.NoError(t, err)
	require.Len(t, all, 2+2+2, "dropped records are deleted")

	// Nothing differs: nothing is written.
	calls := seen.calls
	keep("a", desired("shop", "a", 5))
	// NATS goes and comes back with a change meanwhile unseen: what is known
	// stays, then the change arrives.
	srv.Stop()
	require.True(t, seen.is(map[string]uint64{"shop": 5}))
	srv.Start()
	require.Eventually(t, func() bool {
		return srv.Store.KeepDesired(t.Context(), "a", map[string]placement.Desired{"shop": desired("shop", "a", 6)}) == nil
	}, 2*soon, 20*poll)
	require.Eventually(t, func() bool { return seen.is(map[string]uint64{"shop": 6}) }, 2*soon, poll)
	require.Equal(t, calls+1, seen.calls)

	require.ErrorIs(t, srv.Store.KeepDesired(t.Context(), "a", map[string]placement.Desired{"shop": desired("shop", "b", 1)}), placement.ErrInvalidDesired)
}

// What did not change is not read again, except for a repair now and then.
func TestDesired_ReadsWhatChanged(t *testing.T) {
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	want := map[string]placement.Desired{}
	for i := range 5 {
		w := fmt.Sprintf("web-%d", i)
		want[w] = desired(w, "a", 1)
	}
	require.NoError(t, srv.Store.KeepDesired(t.Context(), "a", want))
	var mu sync.Mutex
	reads := map[string]int{} // by key
	all := dial(t, srv, srv.Identity)
	const prefix = "opfield.read.KV_opfield_desired."
	_, err := all.Subscribe(prefix+">", func(m *nats.Msg) {
		mu.Lock()
		defer mu.Unlock()
		reads[strings.TrimPrefix(m.Subject, prefix)]++
	})
	require.NoError(t, err)
	require.NoError(t, all.Flush())
	take := func() map[string]int {
		mu.Lock()
		defer mu.Unlock()
		out := reads
		reads = map[string]int{}
		return out
	}
	count := func(key string) int {
		mu.Lock()
		defer mu.Unlock()
		return reads[key]
	}

	node := srv.Conn(t, ca.Identity(t, identity.RoleNode, "a"))
	node.ReadDesiredEvery(20*time.Millisecond, time.Hour)
	var seen wanted
	bustest.Go(t, func(ctx context.Context) error { return node.FollowDesired(ctx, seen.set) })
	require.Eventually(t, func() bool {
		return seen.is(map[string]uint64{"web-0": 1, "web-1": 1, "web-2": 1, "web-3": 1, "web-4": 1}) && count("a") >= 5
	}, soon, poll)
	take() // a connection that has only just been made may be read after twice
	require.Eventually(t, func() bool { return count("a") >= 5 }, soon, poll)
	got := take()
	require.Equal(t, map[string]int{"a": got["a"]}, got, "at rest")
	want["web-2"] = desired("web-2", "a", 2)
	require.NoError(t, srv.Store.KeepDesired(t.Context(), "a", want))
	require.Eventually(t, func() bool {
		return seen.is(map[string]uint64{"web-0": 1, "web-1": 1, "web-2": 2, "web-3": 1, "web-4": 1})
	}, soon, poll)
	require.Eventually(t, func() bool { return count("a") >= 5 }, soon, poll)
	got = take()
	require.Equal(t, map[string]int{"a": got["a"], "a.web-2": 1}, got)

	// The repair.
	other := srv.Conn(t, ca.Identity(t, identity.RoleNode, "a"))
	other.ReadDesiredEvery(20*time.Millisecond, 200*time.Millisecond)
	bustest.Go(t, func(ctx context.Context) error {
		return other.FollowDesired(ctx, func(map[string]placement.Desired) {})
	})
	require.Eventually(t, func() bool { return count("a.web-1") >= 3 }, soon, poll)
}

func TestDesired_MalformedRecordHidesNoOther(t *testing.T) {
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	require.NoError(t, srv.Store.KeepDesired(t.Context(), "a", map[string]placement.Desired{"web": desired("web", "a", 1), "bad": desired("bad", "a", 1)}))
	require.NoError(t, srv.Store.Put(t.Context(), bus.BucketDesired, "a.bad", []byte(`{"workload":"bad","node":"b"`)))
	node := srv.Conn(t, ca.Identity(t, identity.RoleNode, "a"))
	var seen wanted
	bustest.Go(t, func(ctx context.Context) error { return node.FollowDesired(ctx, seen.set) })
	// It is not known, and not gone either.
	require.Eventually(t, func() bool { return seen.is(map[string]uint64{"web": 1, "bad": 0}) }, soon, poll)
}

// A record that becomes unreadable stays as it was, also when everything is
// read again.
func TestDesired_MalformedRecordStaysAsKnown(t *testing.T) { // OPS-3
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	want := map[string]placement.Desired{"web": desired("web", "a", 1), "bad": desired("bad", "a", 3)}
	require.NoError(t, srv.Store.KeepDesired(t.Context(), "a", want))
	node := srv.Conn(t, ca.Identity(t, identity.RoleNode, "a"))
	node.ReadDesiredEvery(20*time.Millisecond, 50*time.Millisecond)
	var seen wanted
	bustest.Go(t, func(ctx context.Context) error { return node.FollowDesired(ctx, seen.set) })
	require.Eventually(t, func() bool { return seen.is(map[string]uint64{"web": 1, "bad": 3}) }, soon, poll)
	require.NoError(t, srv.Store.Put(t.Context(), bus.BucketDesired, "a.bad", []byte(`{"workload":"bad","node":"b"`)))
	require.Never(t, func() bool { return !seen.is(map[string]uint64{"web": 1, "bad": 3}) }, 300*time.Millisecond, poll)
	require.NoError(t, srv.Store.Put(t.Context(), bus.BucketDesired, "a", []byte(`{"bad":4,"web":1}`)))
	require.Never(t, func() bool { return !seen.is(map[string]uint64{"web": 1, "bad": 3}) }, 300*time.Millisecond, poll)
}

func TestReports(t *testing.T) { // SEC-2
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	var mu sync.Mutex
	got := map[string]placement.NodeReport{}
	bustest.Go(t, func(ctx context.Context) error {
		return srv.Controller.FollowReports(ctx, func(r placement.NodeReport) {
			mu.Lock()
			defer mu.Unlock()
			got[r.Node] = r
		})
	})
	is := func(node, arch string) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return got[node].Facts.Arch == arch
		}
	}
	report := placement.NodeReport{}
	known := false
	node := srv.Conn(t, ca.Identity(t, identity.RoleNode, "a"))
	bustest.Go(t, func(ctx context.Context) error {
		return node.PublishReport(ctx, func() (placement.NodeReport, bool) {
			mu.Lock()
			defer mu.Unlock()
			return report, known
		})
	})
	set := func(arch string) {
		mu.Lock()
		defer mu.Unlock()
		known, report.Facts.Arch = true, arch
	}
	set("amd64")
	require.Eventually(t, is("a", "amd64"), soon, poll)
	set("arm64")
	begin := time.Now()
	require.Eventually(t, is("a", "arm64"), soon, poll)
	require.Less(t, time.Since(begin), 500*time.Millisecond)

	// Another node's report, under its own subject or theirs.
	b := dial(t, srv, ca.Identity(t, identity.RoleNode, "b"))
	forged, err := json.Marshal(placement.NodeReport{Node: "a", Facts: placement.NodeFacts{Arch: "forged"}})
	require.NoError(t, err)
	b.refusedPublish(t, "opfield.report.v1.node.a", forged)
	require.NoError(t, b.Publish("opfield.report.v1.node.b", forged))
	require.NoError(t, b.Flush())
	require.Never(t, is("a", "forged"), 300*time.Millisecond, poll)
}

func TestInspect(t *testing.T) { // SEC-2
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	_, err := srv.Controller.Inspect(ctx, "a", "web")
	require.ErrorContains(t, err, "node a did not answer")

	node := srv.Conn(t, ca.Identity(t, identity.RoleNode, "a"))
	bustest.Go(t, func(ctx context.Context) error {
		return node.AnswerInspect(ctx, func(_ context.Context, name string) (placement.Captured, error) {
			if name != "web" {
				return placement.Captured{}, errors.New("no container " + name)
			}
			return placement.Captured{Name: name, Unsupported: []string{"x"}}, nil
		})
	})
	require.Eventually(t, func() bool {
		found, err := srv.Controller.Inspect(ctx, "a", "web")
		return err == nil && found.Node == "a" && found.Name == "web" && len(found.Unsupported) == 1
	}, soon, poll)
	_, err = srv.Controller.Inspect(ctx, "a", "other")
	require.ErrorIs(t, err, bus.ErrInspect)
	require.ErrorContains(t, err, "no container other")

	// Nobody but the controller asks, and nobody answers for another.
	b := dial(t, srv, ca.Identity(t, identity.RoleNode, "b"))
	b.refusedPublish(t, "opfield.inspect.v1.node.a", []byte("web"))
	b.refusedPublish(t, "opfield.inspected.v1.node.a.x", nil)
	b.refusedSubscribe(t, "opfield.inspect.v1.node.a")
	b.refusedSubscribe(t, "opfield.inspected.v1.>")
}

func TestPermissions_Desired(t *testing.T) { // SEC-2
	ca := identitytest.New(t)
	srv := bustest.Start(t, ca)
	for _, node := range []string{"a", "b"} {
		require.NoError(t, srv.Store.KeepDesired(t.Context(), node, map[string]placement.Desired{"web": desired("web", node, 1)}))
	}
	require.NoError(t, srv.Store.Put(t.Context(), bus.BucketMembers, "web", []byte(`{}`)))
	a := dial(t, srv, ca.Identity(t, identity.RoleNode, "a"))
	for key, want := range map[string]string{"a": `{"web":1}`, "a.web": `"node":"a"`} {
		m, err := a.Request("opfield.read.KV_opfield_desired."+key, nil, soon)
		require.NoError(t, err)
		require.Contains(t, string(m.Data), want)
	}
	refused := []string{
		"opfield.read.KV_opfield_desired", "opfield.read.KV_opfield_desired.b", "opfield.read.KV_opfield_desired.b.web",
		"opfield.read.KV_opfield_policies", "opfield.read.KV_opfield_members", "opfield.read.KV_opfield_leader",
		"$JS.API.DIRECT.GET.KV_opfield_desired.$KV.opfield_desired.a", "$KV.opfield_desired.a", "$KV.opfield_desired.a.web",
		"opfield.kv.opfield_desired.a",
	}
	for _, s := range refused {
		a.refusedPublish(t, s, []byte(`{"seq":1,"next_by_subj":">","batch":9}`))
	}
	for _, s := range []string{"opfield.kv.opfield_desired.b", "opfield.kv.opfield_desired.b.web", "opfield.kv.opfield_desired.>", "opfield.kv.opfield_desired.*", "opfield.kv.opfield_policies.>", "opfield.kv.opfield_leader.>", "opfield.report.v1.>"} {
		a.refusedSubscribe(t, s)
	}
	// The payload of a request for one key cannot widen it.
	m, err := a.Request("opfield.read.KV_opfield_desired.a", []byte(`{"seq":1,"next_by_subj":"$KV.opfield_desired.b.web","batch":5}`), soon)
	require.NoError(t, err)
	require.NotContains(t, string(m.Data), `"node":"b"`)

	for _, role := range []identity.Role{identity.RoleIngress, identity.RoleRelay, identity.RoleSubscriber} {
		p := dial(t, srv, ca.Identity(t, role, "x"))
		for _, s := range []string{"opfield.read.KV_opfield_desired", "opfield.read.KV_opfield_desired.a", "opfield.read.KV_opfield_policies", "opfield.read.KV_opfield_leader"} {
			p.refusedPublish(t, s, nil)
		}
		p.refusedSubscribe(t, "opfield.kv.opfield_desired.>")
	}
	ingress := srv.Conn(t, ca.Identity(t, identity.RoleIngress, "i"))
	members, err := ingress.ReadBucket(t.Context(), bus.BucketMembers)
	require.NoError(t, err)
	require.Contains(t, members, "web")
	changed := make(chan struct{}, 8)
	bustest.Go(t, func(ctx context.Context) error {
		return ingress.FollowBucket(ctx, bus.BucketMembers, func(map[string][]byte) { changed <- struct{}{} })
	})
	<-changed
	require.NoError(t, srv.Store.Put(t.Context(), bus.BucketMembers, "shop", []byte(`{}`)))
	select {
	case <-changed:
	case <-time.After(soon):
		t.Fatal("a change of the members was not announced")
	}

	// The server's answers, sent where a node asks for, speak for nobody.
	var mu sync.Mutex
	var reports []placement.NodeReport
	bustest.Go(t, func(ctx context.Context) error {
		return srv.Controller.FollowReports(ctx, func(r placement.NodeReport) {
			mu.Lock()
			defer mu.Unlock()
			reports = append(reports, r)
		})
	})
	for _, reply := range []string{"opfield.report.v1.node.b", "opfield.report.v1.node.a", "opfield.inspect.v1.node.b"} {
		require.NoError(t, a.PublishMsg(&nats.Msg{Subject: "opfield.read.KV_opfield_desired.a.web", Reply: reply}))
	}
	require.NoError(t, a.Flush())
	require.Never(t, func() bool { mu.Lock(); defer mu.Unlock(); return len(reports) > 0 }, 300*time.Millisecond, poll)
}
