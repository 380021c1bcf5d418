package demo

import (
	"fmt"
	"slices"
	"time"

	"github.com/opfield/availability/e2e/load"
)

// inFlight is how long before a cut a request may have begun that it hit.
const inFlight = 4 * time.Second

// interim tells how the load has fared so far.
func (d *Demo) interim() {
	ok, failed := 0, 0
	for _, r := range d.run.Results() {
		if r.OK() {
			ok++
		} else {
			failed++
		}
	}
	why := ""
	if failed > 0 {
		why = "; the sum at the end says what they met"
	}
	d.say("so far %d requests succeeded, %d of them on another placement than the first tried, %d failed%s", ok, d.retried(), failed, why)
}

// retried counts the requests that nginx passed on to another placement.
func (d *Demo) retried() int {
	n := 0
	for _, a := range d.sys.AccessLog() {
		if len(a.Tries) > 1 && a.Status == "200" {
			n++
		}
	}
	return n
}

// sum tells how every request ended; the error says that one failed that must
// not: a GET, or a POST that had not been sent to a host when it was cut off.
func (d *Demo) sum(report *load.Report) error {
	ok := len(report.Results) - len(report.Failed(""))
	gets, posts := report.Failed("GET"), report.Failed("POST")
	latency := report.Latency(nil)
	d.say("%d requests: %d succeeded (%d of them on another placement than the first tried), %d GET and %d POST failed; the slowest took %v",
		len(report.Results), ok, d.retried(), len(gets), len(posts), latency.Max.Round(time.Millisecond))
	if len(posts) > 0 {
		d.say("a POST that was sent to a host when it died gets 502: repeating it might do it twice")
	}
	var wrong []load.Result
	for _, p := range posts {
		if !d.excused(p) {
			wrong = append(wrong, p)
		}
	}
	wrong = append(wrong, gets...)
	all := len(wrong)
	wrong = d.butReloads(wrong)
	if n := all - len(wrong); n > 0 {
		d.say("%d requests met a kept-alive connection that nginx had closed for a reload: a browser sends such a request again by itself", n)
	}
	if len(wrong) == 0 {
		d.say("no request failed that must not")
		return nil
	}
	return fmt.Errorf("%w:\n%s", errFailed, report.Describe(wrong, 20))
}

// butReloads leaves out what a reload of nginx costs: it closes idle kept-alive
// connections, and what a client sends at that moment never reaches it.
func (d *Demo) butReloads(failed []load.Result) []load.Result {
	seen := map[string]bool{}
	for _, a := range d.sys.AccessLog() {
		seen[a.ID] = true
	}
	return slices.DeleteFunc(failed, func(r load.Result) bool {
		return !seen[r.ID] && !r.First && (r.Kind == load.NoResponse || r.Kind == load.NotSent)
	})
}

// excused reports whether a failed POST was under way while a cut began and
// ended because of it.
func (d *Demo) excused(p load.Result) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	ended := p.Start.Add(p.Latency)
	for _, c := range d.cuts {
		if p.Start.After(c.from.Add(-inFlight)) && ended.After(c.from) && (c.to.IsZero() || p.Start.Before(c.to)) {
			return true
		}
	}
	return false
}
