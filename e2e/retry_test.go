package e2e

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/system"
)

const (
	eachMethod   = 10
	appRetry     = "7" // Retry-After of the test application
	mostTries    = 5
	mostSentTime = 20 * time.Second
)

// onceMethods must never reach an application twice; FOO and the others that
// nginx does not know it would repeat like a GET by itself.
func onceMethods() []string {
	return []string{"POST", "PATCH", "LOCK", "FOO", "BREW", "PURGE", "M-SEARCH"}
}

func repeatedMethods() []string { return []string{"GET", "PUT", "DELETE", "OPTIONS", "PROPFIND"} }

// each sends every method a few times at once and returns the answers by id.
func (sc *scene) each(name, path string, methods []string) map[string]rawAnswer {
	var mu sync.Mutex
	var wg sync.WaitGroup
	all := map[string]rawAnswer{}
	for _, m := range methods {
		for i := range eachMethod {
			wg.Go(func() {
				r := rawRequest{method: m, path: path, id: fmt.Sprintf("%s-%s-%d", name, m, i)}
				if m != "GET" && m != "OPTIONS" {
					r.body = strings.Repeat("b", 300)
				}
				a := sc.raw(r, nil)
				mu.Lock()
				defer mu.Unlock()
				all[r.id] = a
			})
		}
	}
	wg.Wait()
	return all
}

// RTE-3, RTE-4: who gets a request how often, and what the client sees.
func TestRetry_Deliveries(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 1, Nodes: 3}, false)
	statuses := func(all map[string]rawAnswer) map[int]int {
		count := map[int]int{}
		for id, a := range all {
			require.NoError(t, a.err, id)
			count[a.status]++
		}
		return count
	}
	deliveries := func(all map[string]rawAnswer) map[int]int {
		got, count := sc.delivered(), map[int]int{}
		for id := range all {
			count[got[id]]++
		}
		return count
	}

	// One placement of three drops every request it gets.
	path := "/drop?by=node-1/web"
	once := sc.each("drop1", path, onceMethods())
	t.Logf("one of three placements drops, %v: statuses %v, deliveries %v", onceMethods(), statuses(once), deliveries(once))
	got := sc.delivered()
	for id, a := range once {
		require.Equal(t, 1, got[id], "%s was delivered %d times (%d)", id, got[id], a.status)
		require.Contains(t, []int{200, 502}, a.status, id)
	}
	repeated := sc.each("drop1", path, repeatedMethods())
	t.Logf("one of three placements drops, %v: statuses %v, deliveries %v", repeatedMethods(), statuses(repeated), deliveries(repeated))
	got = sc.delivered()
	for id, a := range repeated {
		require.Equal(t, 200, a.status, "%s: %s", id, a.body)
		require.LessOrEqual(t, got[id], mostTries, id)
	}

	// Every placement drops.
	once = sc.each("drop", "/drop", onceMethods())
	t.Logf("all placements drop, %v: statuses %v, deliveries %v", onceMethods(), statuses(once), deliveries(once))
	got = sc.delivered()
	for id, a := range once {
		require.Equal(t, 1, got[id], "%s was delivered %d times", id, got[id])
		require.Equal(t, 502, a.status, "a request that was sent and lost keeps its 502: %s", id)
	}
	repeated = sc.each("drop", "/drop", repeatedMethods())
	t.Logf("all placements drop, %v: statuses %v, deliveries %v", repeatedMethods(), statuses(repeated), deliveries(repeated))
	got = sc.delivered()
	for id, a := range repeated {
		require.Equal(t, 502, a.status, id)
		require.GreaterOrEqual(t, got[id], 2, id)
		require.LessOrEqual(t, got[id], mostTries, id)
	}

	// Every placement answers 503 itself.
	once = sc.each("busy", "/status?code=503", onceMethods())
	t.Logf("all placements answer 503, %v: statuses %v, deliveries %v", onceMethods(), statuses(once), deliveries(once))
	repeated = sc.each("busy", "/status?code=503", repeatedMethods())
	t.Logf("all placements answer 503, %v: statuses %v, deliveries %v", repeatedMethods(), statuses(repeated), deliveries(repeated))
	got = sc.delivered()
	for id, a := range once {
		require.Equal(t, 1, got[id], "%s was delivered %d times", id, got[id])
		repeated[id] = a
	}
	for id, a := range repeated {
		require.Equal(t, 503, a.status, id)
		require.Contains(t, a.body, "application says 503", id)
		require.Equal(t, appRetry, a.header.Get("Retry-After"), id)
		require.LessOrEqual(t, got[id], 3, "%s: each placement once", id)
	}

	// One placement answers 503: the others serve what may be repeated.
	repeated = sc.each("busy1", "/status?code=503&by=node-2/web", repeatedMethods())
	t.Logf("one of three placements answers 503, %v: statuses %v, deliveries %v", repeatedMethods(), statuses(repeated), deliveries(repeated))
	for id, a := range repeated {
		require.Equal(t, 200, a.status, id)
	}

	// Nothing serves and nothing was sent: our own page.
	for _, n := range sc.Nodes {
		sc.apps[n.ID].Kill("KILL")
	}
	sc.Env.Await(5*time.Second, "nothing is open", func() bool {
		for _, n := range sc.Nodes {
			if sc.LinkState(link(n.ID)) == "open" {
				return false
			}
		}
		return true
	})
	nothing := sc.each("nothing", "/ok", []string{"GET", "POST", "FOO", "PUT"})
	var slowest time.Duration
	got = sc.delivered()
	for id, a := range nothing {
		require.NoError(t, a.err, id)
		require.Equal(t, 503, a.status, "%s: %s", id, a.body)
		require.NotEmpty(t, a.header.Get("Retry-After"), id)
		require.NotContains(t, a.body, "application says", id)
		require.Zero(t, got[id], id)
		slowest = max(slowest, a.took)
	}
	t.Logf("nothing serves: %v, the slowest answer after %v", statuses(nothing), slowest.Round(time.Millisecond))
	require.Less(t, slowest, mostSentTime)
}

// RTE-4: both rendered primaries are closed and a third placement opens that
// nginx has not been told of as one.
func TestRetry_OnlyABackupServes(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 1, Nodes: 3}, false)
	last := sc.Nodes[2]
	first, err := sc.IngressStatus()
	require.NoError(t, err)
	sc.apps[last.ID].Kill("KILL")
	var before system.IngressStatus
	sc.Env.Await(60*time.Second, "nginx lists "+last.ID+" as a backup", func() bool {
		before, err = sc.IngressStatus()
		return err == nil && before.Reload.Generation != first.Reload.Generation && !before.Reload.Pending
	})
	sc.apps[last.ID].Start()
	sc.AwaitLinks(20*time.Second, "open", link(last.ID))
	for _, n := range sc.Nodes[:2] {
		sc.apps[n.ID].Kill("KILL")
	}
	sc.Env.Await(5*time.Second, "both primaries are joined", func() bool {
		return sc.LinkState(link("node-1")) == "joined" && sc.LinkState(link("node-2")) == "joined"
	})
	methods := append(onceMethods(), repeatedMethods()...)
	got := map[int]int{}
	for round := range 3 {
		for id, a := range sc.each(fmt.Sprintf("third%d", round), "/ok", methods) {
			require.NoError(t, a.err, id)
			require.Equal(t, 200, a.status, "%s: %s", id, a.body)
			require.Equal(t, "node-3/web", a.header.Get("X-Served-By"), id)
			got[a.status]++
		}
	}
	after, err := sc.IngressStatus()
	require.NoError(t, err)
	require.Equal(t, before.Reload.Generation, after.Reload.Generation, "nginx was reloaded meanwhile: the test proves nothing")
	t.Logf("only a placement that nginx lists as backup serves: %v", got)

	// The same when nothing serves for a while first: requests wait and none is
	// lost.
	sc.apps[last.ID].Kill("KILL")
	sc.Env.Await(5*time.Second, "nothing is open", func() bool { return sc.LinkState(link(last.ID)) != "open" })
	done := make(chan map[string]rawAnswer, 1)
	go func() { done <- sc.each("held", "/ok", methods) }()
	sc.apps[last.ID].Start()
	var slowest time.Duration
	for id, a := range <-done {
		require.NoError(t, a.err, id)
		require.Equal(t, 200, a.status, "%s: %s", id, a.body)
		slowest = max(slowest, a.took)
	}
	t.Logf("held until a placement opened: all 200, the slowest after %v", slowest.Round(time.Millisecond))
}
