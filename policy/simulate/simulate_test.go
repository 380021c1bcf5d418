package simulate_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/policy/simulate"
)

func config(seed uint64, length time.Duration) simulate.Config {
	return simulate.Config{
		Seed: seed, Nodes: 3 + int(seed%4), Policies: 1 + int(seed%3), For: length,
		FaultEvery: 20 * time.Minute, UserEvery: 40 * time.Minute,
	}
}

func TestRun_Invariants(t *testing.T) {
	for seed := range uint64(400) {
		r := simulate.Run(config(seed, 24*time.Hour))
		if r.Broken != nil {
			t.Fatalf("seed %d: %v\n%s", seed, r.Broken, strings.Join(r.Trace[max(0, len(r.Trace)-60):], "\n"))
		}
	}
}

// The same seed gives the same run, so that a failing one can be replayed.
func TestRun_SameSeedSameTrace(t *testing.T) {
	trace := func() string {
		var all strings.Builder
		c := config(7, 48*time.Hour)
		c.Trace = func(line string) { all.WriteString(line + "\n") }
		simulate.Run(c)
		return all.String()
	}
	require.Equal(t, trace(), trace())
}
