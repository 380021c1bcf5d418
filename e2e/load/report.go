package load

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/opfield/availability/e2e/delivery"
)

// Report is the outcome of a run.
type Report struct {
	Began   time.Time
	Results []Result
}

// Select returns the results that match.
func (r *Report) Select(match func(Result) bool) []Result {
	var found []Result
	for _, res := range r.Results {
		if match(res) {
			found = append(found, res)
		}
	}
	return found
}

// Failed returns the results of a method that are not a whole 200; "" means
// every method.
func (r *Report) Failed(method string) []Result {
	return r.Select(func(res Result) bool { return !res.OK() && (method == "" || res.Method == method) })
}

// Latency sums up how long requests took.
type Latency struct {
	Count         int
	P50, P99, Max time.Duration
}

// Latency returns the figures of the results that match; nil matches all.
func (r *Report) Latency(match func(Result) bool) Latency {
	var all []time.Duration
	for _, res := range r.Results {
		if match == nil || match(res) {
			all = append(all, res.Latency)
		}
	}
	if len(all) == 0 {
		return Latency{}
	}
	slices.Sort(all)
	return Latency{Count: len(all), P50: all[len(all)/2], P99: all[len(all)*99/100], Max: all[len(all)-1]}
}

// Joined sets the client's view beside the application's.
type Joined struct {
	// Deliveries of each request id, in time order.
	Deliveries map[string][]delivery.Record
	// Doubled requests reached the application more than once.
	Doubled []Result
	// FailedUndelivered requests failed at the client and never reached an
	// application.
	FailedUndelivered []Result
	// FailedDelivered requests failed at the client although an application
	// received them.
	FailedDelivered []Result
	// Phantom requests succeeded at the client but no application received
	// them: the count itself is wrong.
	Phantom []Result
}

// Join matches every result with what the applications recorded.
func (r *Report) Join(records []delivery.Record) Joined {
	j := Joined{Deliveries: map[string][]delivery.Record{}}
	for _, rec := range records {
		if rec.Phase == delivery.Received {
			j.Deliveries[rec.ID] = append(j.Deliveries[rec.ID], rec)
		}
	}
	for _, list := range j.Deliveries {
		slices.SortFunc(list, func(a, b delivery.Record) int { return a.At.Compare(b.At) })
	}
	for _, res := range r.Results {
		n := len(j.Deliveries[res.ID])
		if n > 1 {
			j.Doubled = append(j.Doubled, res)
		}
		switch {
		case !res.OK() && n == 0:
			j.FailedUndelivered = append(j.FailedUndelivered, res)
		case !res.OK():
			j.FailedDelivered = append(j.FailedDelivered, res)
		case n == 0:
			j.Phantom = append(j.Phantom, res)
		}
	}
	return j
}

// DoubledBy returns the doubled requests of a method.
func (j Joined) DoubledBy(method string) []Result {
	return slices.DeleteFunc(slices.Clone(j.Doubled), func(r Result) bool { return r.Method != method })
}

// DeliveredTo returns the failed requests that only the given container
// ("node/container") received: what was sent to the host that died.
func (j Joined) DeliveredTo(by string) []Result {
	return slices.DeleteFunc(slices.Clone(j.FailedDelivered), func(r Result) bool {
		return slices.ContainsFunc(j.Deliveries[r.ID], func(rec delivery.Record) bool { return rec.By != by })
	})
}

// String is the report for people: one line per stream and outcome.
func (r *Report) String() string {
	type row struct{ stream, outcome string }
	groups := map[row][]Result{}
	for _, res := range r.Results {
		outcome := string(res.Kind)
		if res.Kind == Complete {
			outcome = fmt.Sprintf("%d", res.Status)
		}
		k := row{res.Stream, outcome}
		groups[k] = append(groups[k], res)
	}
	keys := slices.SortedFunc(maps.Keys(groups), func(a, b row) int {
		return cmp.Or(cmp.Compare(a.stream, b.stream), cmp.Compare(a.outcome, b.outcome))
	})
	var b strings.Builder
	fmt.Fprintf(&b, "%-16s %-12s %7s %10s %10s %10s %14s\n", "stream", "outcome", "count", "p50", "p99", "max", "max of first")
	for _, k := range keys {
		group := Report{Results: groups[k]}
		all := group.Latency(nil)
		first := group.Latency(func(res Result) bool { return res.First })
		fmt.Fprintf(&b, "%-16s %-12s %7d %10s %10s %10s %14s\n", k.stream, k.outcome, all.Count, short(all.P50), short(all.P99), short(all.Max), short(first.Max))
	}
	return b.String()
}

// Describe lists results, at most n of them, with the time since the run
// began.
func (r *Report) Describe(results []Result, n int) string {
	var b strings.Builder
	for i, res := range results {
		if i == n {
			fmt.Fprintf(&b, "and %d more\n", len(results)-n)
			break
		}
		fmt.Fprintf(&b, "%s at %s after %s: %s %d first=%t by=%s %s\n", res.ID, short(res.Start.Sub(r.Began)), short(res.Latency),
			res.Kind, res.Status, res.First, res.ServedBy, res.Err)
	}
	return b.String()
}

func short(d time.Duration) string {
	switch {
	case d >= time.Second:
		return d.Round(time.Millisecond).String()
	default:
		return d.Round(10 * time.Microsecond).String()
	}
}
