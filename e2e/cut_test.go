package e2e

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/system"
)

const (
	cutRounds = 3
	cutTotal  = 200000 // bytes of a whole body
	cutSmall  = 3000   // nginx has not passed on anything of it yet
)

// cutCase is one response that is under way when something breaks.
type cutCase struct {
	name, query string
	least       int64 // body bytes to wait for before it breaks
}

// cutCases are every framing, each silent in the middle of its body and each
// running; those whose end is not known from a length also after their last
// byte, where a cut looks most like an end.
func cutCases(end string) []cutCase {
	var all []cutCase
	for _, mode := range []string{"length", "chunked", "close"} {
		all = append(all, cutCase{mode + " small", fmt.Sprintf("mode=%s&total=%d&bytes=%d&end=%s", mode, 2*cutSmall, cutSmall, end), 0})
		all = append(all, cutCase{mode + " half", fmt.Sprintf("mode=%s&total=%d&bytes=%d&end=%s", mode, cutTotal, cutTotal/2, end), cutTotal / 4})
		if mode != "length" {
			all = append(all, cutCase{mode + " all but the end", fmt.Sprintf("mode=%s&total=%d&end=%s", mode, cutTotal, end), cutTotal / 2})
		}
		if end == "hang" {
			all = append(all, cutCase{mode + " running", fmt.Sprintf("mode=%s&total=%d&seconds=30", mode, 30*cutTotal), cutTotal / 2})
		}
	}
	return all
}

// fault breaks something under way; mend undoes it.
type fault struct {
	name, end    string // end is what the application does
	rounds       int
	strike, mend func()
}

// LNK-6: whatever cuts a response, its client sees an error and never a short
// body that looks whole; a normal end without a length arrives whole.
func TestCut_NeverLooksWhole(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 1, Nodes: 1}, false)
	node, relay, sidecar := sc.Nodes[0], sc.Relays[0].Process, sc.Ingress.Process
	sc.requireCuts(
		fault{"application reset", "reset", cutRounds, func() {}, func() {}},
		fault{"node cut", "hang", cutRounds, node.Cut, node.Heal},
		fault{"relay killed", "hang", cutRounds, relay.Kill, relay.Start},
		fault{"sidecar killed", "hang", cutRounds, sidecar.Kill, sidecar.Start},
	)
}

// LNK-6: neither does a response look whole that an orderly end of one of our
// processes cuts because it takes too long.
func TestCut_OrderlyEnds(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 1, Nodes: 1, IngressArgs: []string{"--stop-within", "1s"}}, false)
	agent, relay, sidecar := sc.Nodes[0].Agent, sc.Relays[0].Process, sc.Ingress.Process
	term := func(p *lab.Process) func() { return func() { p.Stop(rawLimit) } }
	sc.requireCuts(
		fault{"agent killed", "hang", cutRounds, agent.Kill, agent.Start},
		fault{"agent stopped", "hang", 1, term(agent), agent.Start},
		fault{"relay stopped", "hang", 1, term(relay), relay.Start},
		fault{"sidecar stopped", "hang", 2, term(sidecar), sidecar.Start},
	)
}

// requireCuts has responses of every kind under way at every fault.
func (sc *scene) requireCuts(faults ...fault) {
	t := sc.t
	t.Helper()
	for f, fault := range faults {
		took, n := time.Duration(0), 0
		for round := range fault.rounds {
			for _, mode := range []string{"length", "chunked", "close"} {
				a := sc.raw(rawRequest{method: "GET", id: fmt.Sprintf("whole-%d-%d-%s", f, round, mode),
					path: fmt.Sprintf("/partial?mode=%s&total=%d&end=complete", mode, cutTotal)}, nil)
				require.NoError(t, a.err, "a whole %s response before: %s", mode, fault.name)
				require.Len(t, a.body, cutTotal)
			}
			cases := cutCases(fault.end)
			answers, received := make([]rawAnswer, len(cases)), make([]atomic.Int64, len(cases))
			var wg sync.WaitGroup
			for i, c := range cases {
				wg.Go(func() {
					answers[i] = sc.raw(rawRequest{method: "GET", id: fmt.Sprintf("cut-%d-%d-%d", f, round, i), path: "/partial?" + c.query}, &received[i])
				})
			}
			if fault.end == "hang" {
				sc.Env.Await(10*time.Second, "the responses are under way", func() bool {
					for i, c := range cases {
						if received[i].Load() < c.least {
							return false
						}
					}
					return true
				})
			}
			struck := time.Now()
			fault.strike()
			wg.Wait()
			took = max(took, time.Since(struck))
			for i, c := range cases {
				n++
				if c.least == 0 && answers[i].err == nil {
					// The fault came before the response's head: nginx says so itself.
					require.Equal(t, 502, answers[i].status, "%s, %s", fault.name, c.name)
					continue
				}
				if c.least > 0 {
					require.Equal(t, 200, answers[i].status, "%s, %s: %v", fault.name, c.name, answers[i].err)
				}
				require.True(t, answers[i].cut(), "%s, %s: %d bytes of a response that was cut look whole (%v)", fault.name, c.name, len(answers[i].body), answers[i].err)
				require.Less(t, answers[i].took, rawLimit, "%s, %s: the client waited in vain", fault.name, c.name)
			}
			fault.mend()
			sc.AwaitLinks(20*time.Second, "open", link(sc.Nodes[0].ID))
			sc.AwaitRoute(20*time.Second, webHost)
		}
		t.Logf("%s: %d responses cut, every client saw an error, the last one %v after the fault", fault.name, n, took.Round(time.Millisecond))
	}
}
