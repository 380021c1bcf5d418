package engine_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
	"github.com/opfield/availability/policy/engine/enginetest"
)

// stored returns the document of a workload that has run for long on three
// nodes.
func stored(workload string, nodes ...string) policy.Document {
	now := time.Now().Add(-time.Hour)
	c := placement.Captured{
		Node: nodes[0], Kind: placement.KindContainer, ID: workload + "-" + nodes[0] + "-0", Name: workload, Running: true, ImageID: "sha256:" + workload,
		Arch: "amd64", CPU: 50, Memory: 64 << 20, RestartPolicy: "always", Spec: enginetest.Spec(),
	}
	d := policy.NewDocument(now, policy.Eligibility{Workload: workload, Ports: enginetest.Ports(), Settings: replicated(len(nodes))}, c, 0)
	d.Versions[0].Image = placement.Image{Repository: workload, Digest: "sha256:" + workload, Config: "sha256:" + workload, Platforms: []string{"linux/amd64"}}
	d.Operations, d.Routed = nil, true
	for _, n := range nodes[1:] {
		d.Counter++
		d.Placements = append(d.Placements, policy.Placement{Node: n, Want: placement.WantServing, Generation: 1, Revision: d.Counter, Asked: d.Counter, Since: now})
	}
	return d
}

// store writes documents as if a controller had.
func store(t *testing.T, c *enginetest.Cluster, docs ...policy.Document) {
	t.Helper()
	var wg sync.WaitGroup
	errs := make([]error, len(docs))
	slots := make(chan struct{}, 16)
	for i, d := range docs {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			data, err := json.Marshal(d)
			if err == nil {
				err = c.NATS.Store.Put(t.Context(), bus.BucketPolicies, d.Workload, data)
			}
			errs[i] = err
		})
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
}

func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

func TestScale_ThousandPoliciesOnFiftyNodes(t *testing.T) {
	const policies, nodes, copies = manyPolicies, manyNodes, 3
	c := enginetest.New(t, nodes)
	var docs []policy.Document
	for i := range policies {
		var on []string
		for j := range copies {
			on = append(on, c.Nodes[(i+j*17)%nodes].ID)
		}
		w := fmt.Sprintf("web-%d", i+1)
		c.Node(on[0]).Run(w)
		docs = append(docs, stored(w, on...))
	}
	begin := time.Now()
	store(t, c, docs...)
	t.Logf("%d documents stored in %v", policies, time.Since(begin).Round(time.Millisecond))

	// A controller that finds all of them, and nodes that have nothing yet.
	k := c.Start()
	load := awaitLead(t, k, soon)
	begin = time.Now()
	healthy := func() bool {
		n := 0
		for _, v := range k.List() {
			if v.Health == policy.Healthy && v.Operation == nil {
				n++
			}
		}
		return n == policies
	}
	slow := func(within time.Duration, ok func() bool) bool {
		tick := time.NewTicker(250 * time.Millisecond)
		defer tick.Stop()
		for end := time.Now().Add(within); !ok(); <-tick.C {
			if time.Now().After(end) {
				return false
			}
		}
		return true
	}
	healthyWithin := func(within time.Duration) {
		t.Helper()
		if slow(within, healthy) {
			return
		}
		shown := map[string]int{}
		for _, v := range k.List() {
			if v.Health != policy.Healthy || v.Operation != nil {
				shown[string(v.Health)]++
				for _, p := range v.Placements {
					if p.Want == placement.WantServing && !p.Ready {
						shown[p.Node+" "+string(p.State)]++
					}
				}
			}
		}
		for _, n := range k.Nodes() {
			if !n.Known {
				shown["unheard "+n.ID]++
			}
		}
		t.Fatal(shown)
	}
	healthyWithin(3 * time.Minute)
	t.Logf("loaded in %v; all placements and standbys created in %v", load.Round(time.Millisecond), time.Since(begin).Round(time.Millisecond))

	// What one full pass with nothing to do costs: a node that was lost for a
	// moment starts one.
	settled := func() bool { before := k.Store.Writes(); <-time.After(time.Second); return k.Store.Writes() == before }
	require.True(t, slow(2*time.Minute, settled))
	passes := 0
	sum := k.Metric("opfield_policy_pass_seconds")
	before := allocated()
	var longest float64
	for range 5 {
		last := k.Metric("opfield_policy_pass_seconds")
		c.Fleet.Set("node-1", policy.NodeOnline)
		require.True(t, until(soon, func() bool { return k.Metric("opfield_policy_pass_seconds") > last }))
		longest = max(longest, k.Metric("opfield_policy_pass_seconds")-last)
		passes++
	}
	t.Logf("a full pass: %.0f ms on average, %.0f ms at most, about %d KiB allocated by everything meanwhile",
		1000*(k.Metric("opfield_policy_pass_seconds")-sum)/float64(passes), 1000*longest, (allocated()-before)/uint64(passes)>>10)
	if measured {
		require.Less(t, longest, 1.0)
	}

	// A restart.
	with := heap()
	k.Stop()
	k = nil
	without := heap()
	t.Logf("memory of the controller's part: about %d MiB", (int64(with)-int64(without))>>20)
	begin = time.Now()
	k = c.Start()
	load = awaitLead(t, k, soon)
	healthyWithin(soon)
	t.Logf("after a restart it led in %v and knew everything to be healthy in %v", load.Round(time.Millisecond), time.Since(begin).Round(time.Millisecond))
	if measured {
		require.Less(t, load, 3*time.Second)
		require.Less(t, time.Since(begin), 15*time.Second)
	}
	for i := range policies {
		require.LessOrEqual(t, c.Created(fmt.Sprintf("web-%d", i+1)), copies-1, "nothing was created again")
	}

	if !measured {
		return
	}
	// Traffic at rest.
	require.True(t, slow(time.Minute, settled))
	listener := c.Listen()
	<-time.After(2 * time.Second)
	listener.Take()
	const rest = time.Minute // one repair, and two by every node
	before = allocated()
	<-time.After(rest)
	counts := listener.Take()
	var total enginetest.Count
	for _, kind := range slices.Sorted(maps.Keys(counts)) {
		n := counts[kind]
		total.Messages, total.Bytes = total.Messages+n.Messages, total.Bytes+n.Bytes
		t.Logf("at rest, per minute: %-28s %6d messages %8.2f MB", kind, n.Messages, float64(n.Bytes)/1e6)
	}
	t.Logf("at rest, per minute: %-28s %6d messages %8.2f MB; all of this process allocated %d MB", "all", total.Messages, float64(total.Bytes)/1e6, (allocated()-before)/1e6)
}
