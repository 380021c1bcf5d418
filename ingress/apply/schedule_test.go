package apply

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// begins returns when applies begin if the changes come at these offsets and
// every apply takes a while.
func begins(t *testing.T, takes time.Duration, changes map[time.Duration]Change, until time.Duration) []time.Duration {
	var out []time.Duration
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var s Schedule
		var ends time.Time
		for now := start; now.Sub(start) <= until; now = time.Now() {
			if c, ok := changes[now.Sub(start)]; ok {
				s.Note(now, c)
			}
			if !ends.IsZero() && !now.Before(ends) {
				s.Succeeded()
				ends = time.Time{}
			}
			if at, ok := s.Due(); ok && !now.Before(at) {
				s.Began()
				ends = now.Add(takes)
				out = append(out, now.Sub(start))
			}
			time.Sleep(time.Millisecond) // inside the bubble
		}
	})
	return out
}

func TestSchedule(t *testing.T) { // RTE-8
	t.Run("a prompt change begins within 2 s", func(t *testing.T) {
		got := begins(t, time.Second, map[time.Duration]Change{0: Prompt}, time.Minute)
		require.Equal(t, []time.Duration{promptGap}, got)
	})
	t.Run("500 changes in 2 s are at most 3", func(t *testing.T) {
		changes := map[time.Duration]Change{}
		for i := range 500 {
			changes[time.Duration(i)*4*time.Millisecond] = Prompt
		}
		got := begins(t, 300*time.Millisecond, changes, time.Minute)
		require.LessOrEqual(t, len(got), 3)
		require.LessOrEqual(t, got[0], 2*time.Second)
	})
	t.Run("quiet changes wait for 30 s of quiet", func(t *testing.T) {
		got := begins(t, time.Second, map[time.Duration]Change{0: Quiet, 20 * time.Second: Quiet, 45 * time.Second: Quiet}, 3*time.Minute)
		require.Equal(t, []time.Duration{75 * time.Second}, got)
	})
	t.Run("a prompt change takes the quiet ones along", func(t *testing.T) {
		got := begins(t, time.Second, map[time.Duration]Change{0: Quiet, 10 * time.Second: Prompt}, 2*time.Minute)
		require.Equal(t, []time.Duration{10*time.Second + promptGap}, got)
	})
	t.Run("one at a time", func(t *testing.T) {
		got := begins(t, 5*time.Second, map[time.Duration]Change{0: Prompt, time.Second: Prompt, 2 * time.Second: Prompt}, time.Minute)
		require.Equal(t, []time.Duration{promptGap, promptGap + 5*time.Second}, got)
	})
}

func TestSchedule_Retries(t *testing.T) {
	now := time.Unix(0, 0)
	var s Schedule
	s.Note(now, Prompt)
	var waits []time.Duration
	for range 7 {
		s.Began()
		s.Failed(now)
		at, ok := s.Due()
		require.True(t, ok)
		require.True(t, s.Pending())
		waits = append(waits, at.Sub(now))
	}
	require.Equal(t, 2*time.Second, waits[0])
	require.Equal(t, time.Minute, waits[6])
	s.Began()
	s.Succeeded()
	_, ok := s.Due()
	require.False(t, ok)
	require.False(t, s.Pending())
}

func TestIsolate(t *testing.T) { // RTE-7
	rapid.Check(t, func(t *rapid.T) {
		var names []string
		broken := map[string]bool{}
		for i := range rapid.IntRange(1, 40).Draw(t, "routes") {
			name := fmt.Sprintf("r%d", i)
			names = append(names, name)
			if rapid.IntRange(0, 9).Draw(t, "broken") == 0 {
				broken[name] = true
			}
		}
		if len(broken) == 0 {
			broken[names[0]] = true
		}
		test := func(keep []string) error {
			if slices.ContainsFunc(keep, func(n string) bool { return broken[n] }) {
				return errors.New("refused")
			}
			return nil
		}
		bad, err := Isolate(names, test)
		if err != nil || len(bad) != len(broken) {
			t.Fatalf("%v of %v: %v", bad, broken, err)
		}
		for n := range bad {
			if !broken[n] {
				t.Fatalf("%s is fine", n)
			}
		}
	})
	_, err := Isolate([]string{"a"}, func([]string) error { return errors.New("always") })
	require.EqualError(t, err, "always")
}

// Two routes that only fail together: the later one is left out.
func TestIsolate_Pair(t *testing.T) {
	bad, err := Isolate([]string{"a", "b", "c", "d"}, func(keep []string) error {
		if slices.Contains(keep, "b") && slices.Contains(keep, "d") {
			return errors.New("both")
		}
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, map[string]error{"d": errors.New("both")}, bad)
}

func TestNewRefusal(t *testing.T) {
	line := refusalLine([]byte("x\n2026/11/30 10:00:00 [emerg] 12#12: bind() to [::]:18100 failed (98: Address already in use)\n"))
	require.Equal(t, "[emerg] bind() to [::]:18100 failed (98: Address already in use)", line)
	require.Equal(t, uint16(18100), newRefusal(line).Port)
	require.Equal(t, uint16(0), newRefusal(`[emerg] unknown directive "x" in /a:1`).Port)
	require.Equal(t, `[warn] y`, refusalLine([]byte("nginx: [warn] y\nnginx: ok\n")))
}
