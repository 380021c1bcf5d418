package simulate_test

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/policy/simulate"
)

// seedHours is how long a seed's cluster is simulated.
const seedHours = 48

// config is the cluster of a seed. Every fourth is dense: a fault each 20
// minutes, and each 40 minutes somebody changes their mind about each policy.
// The others have a fault each 4 hours and a change each 6 hours.
func config(seed uint64, length time.Duration) simulate.Config {
	c := simulate.Config{
		Seed: seed, Nodes: 3 + int(seed%4), Policies: 1 + int(seed%3), For: length, FaultEvery: 4 * time.Hour, UserEvery: 6 * time.Hour,
	}
	if seed%4 == 0 {
		c.FaultEvery, c.UserEvery = 20*time.Minute, 40*time.Minute
	}
	if seed%32 == 4 {
		c.Nodes, c.Policies = 8, 7 // more than may be worked on at once
	}
	return c
}

// total is what many runs were.
type total struct {
	simulate.Result
	seeds int
}

// simulated runs seeds on every core until there are enough policy-hours, and
// returns what happened or the failure of the lowest seed.
func simulated(hours float64) (total, uint64, simulate.Result) {
	var next atomic.Uint64
	var mu sync.Mutex
	var wg sync.WaitGroup
	all := total{Result: simulate.Result{Operations: map[simulate.Ended]int{}}}
	failing, failure := uint64(0), simulate.Result{}
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				mu.Lock()
				enough := all.Hours >= hours || failure.Broken != nil
				mu.Unlock()
				if enough {
					return
				}
				seed := next.Add(1) - 1
				r := simulate.Run(config(seed, seedHours*time.Hour))
				mu.Lock()
				if r.Broken != nil && (failure.Broken == nil || seed < failing) {
					failing, failure = seed, r
				}
				all.seeds++
				all.Hours += r.Hours
				all.Decisions += r.Decisions
				all.Faults += r.Faults
				all.Actions += r.Actions
				all.Kills += r.Kills
				for k, n := range r.Operations {
					all.Operations[k] += n
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return all, failing, failure
}

func check(t *testing.T, hours float64) total {
	t.Helper()
	all, seed, failure := simulated(hours)
	if failure.Broken != nil {
		t.Fatalf("%s\nseed %d: %v\nreplay: go test ./policy/simulate -run Replay -v -replay -args %d %d",
			strings.Join(failure.Trace[max(0, len(failure.Trace)-60):], "\n"), seed, failure.Broken, seed, seedHours)
	}
	return all
}

// The invariants hold in some hundred clusters.
func TestRun_Invariants(t *testing.T) {
	all := check(t, 5_000)
	require.Greater(t, all.Kills, 100)
	for _, ended := range []simulate.Ended{
		{Type: "enable", Status: "completed"}, {Type: "scale", Status: "completed"}, {Type: "rollout", Status: "completed"}, {Type: "rollout", Status: "failed"},
		{Type: "rollout", Status: "cancelled"}, {Type: "heal", Status: "completed"}, {Type: "failback", Status: "completed"},
		{Type: "start", Status: "completed"}, {Type: "stop", Status: "completed"}, {Type: "restart", Status: "completed"},
		{Type: "disable", Status: "completed"}, {Type: "cleanup", Status: "completed"},
	} {
		require.Positive(t, all.Operations[ended], "no %s %s: what is simulated says nothing about it", ended.Type, ended.Status)
	}
}

// The long run, of `make simulate`.
func TestSimulateLong(t *testing.T) {
	text := os.Getenv("OPFIELD_SIMULATE_HOURS")
	if text == "" {
		return
	}
	hours, err := strconv.ParseFloat(text, 64)
	require.NoError(t, err, "OPFIELD_SIMULATE_HOURS: want a number of policy-hours, such as 1000000")
	began := time.Now()
	all := check(t, hours)
	took := time.Since(began)
	fmt.Printf("policy-hours       %.0f in %d clusters of %d hours each\n", all.Hours, all.seeds, seedHours)
	fmt.Printf("decisions          %d\n", all.Decisions)
	fmt.Printf("faults             %d\n", all.Faults)
	fmt.Printf("user actions       %d\n", all.Actions)
	fmt.Printf("controller kills   %d\n", all.Kills)
	fmt.Println("operations")
	for _, k := range slices.SortedFunc(maps.Keys(all.Operations), func(a, b simulate.Ended) int {
		return strings.Compare(fmt.Sprint(a), fmt.Sprint(b))
	}) {
		fmt.Printf("  %-10s %-16s %d\n", k.Type, k.Status, all.Operations[k])
	}
	fmt.Printf("wall time          %v on %d cores, %.0f policy-hours per second\n", took.Round(time.Second/10), runtime.GOMAXPROCS(0), all.Hours/took.Seconds())
}

// The same seed gives the same run, so that a failing one can be replayed.
func TestRun_SameSeedSameTrace(t *testing.T) {
	trace := func() string {
		var all strings.Builder
		c := config(4, 48*time.Hour)
		c.Trace = func(line string) { all.WriteString(line + "\n") }
		simulate.Run(c)
		return all.String()
	}
	require.Equal(t, trace(), trace())
}
