package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/policy"
)

const (
	pollSeconds = 15 // how long the server may wait for a change
	redrawEvery = time.Second
	barCells    = 30
	someWidth   = 80 // of a terminal that does not tell
	someHeight  = 24
)

// waitFlags say whether a command ends before its operation does.
type waitFlags struct {
	Wait   bool `help:"Show the progress until the operation is over; exit code 1 if it fails. Default on a terminal." xor:"wait"`
	NoWait bool `help:"Return when the request is accepted. Default without a terminal." xor:"wait"`
}

// send asks for an operation and shows it.
func (f waitFlags) send(s *session, workload, method, path string, body any) error {
	var op policy.Operation
	if err := s.client.call(s.ctx, method, path, body, &op); err != nil {
		return err
	}
	if f.Wait || s.terminal() && !f.NoWait {
		return s.follow(workload, op)
	}
	if s.json {
		return s.printJSON(op)
	}
	s.say("accepted: %s %s; see `opfield ha operations %s --follow`", op.Type, op.ID, workload)
	return nil
}

// progress is an operation with what it works on.
type progress struct {
	Operation  policy.Operation       `json:"operation"`
	Health     policy.Health          `json:"health,omitempty"`
	Placements []policy.PlacementView `json:"placements"`
}

// over reports whether there is nothing to wait for: what is left of a
// cleanup waits for a node that may be away for days.
func (p progress) over() bool {
	return p.Operation.Status.Over() || p.Operation.Status == policy.CleanupPending
}

// bulletin is news about an operation; err is a controller that is away.
type bulletin struct {
	progress progress
	err      error
}

// follow shows an operation until it is over. An interruption ends the view
// only.
func (s *session) follow(workload string, op policy.Operation) error {
	id := op.ID
	ctx, stop := context.WithCancel(s.ctx)
	news := make(chan bulletin)
	failed := make(chan error, 1)
	go func() {
		defer close(news)
		failed <- s.client.watchOperation(ctx, workload, op, news)
	}()
	defer func() {
		stop()
		for range news { // the watcher has ended when it is closed
		}
	}()
	v := s.viewer()
	tick := time.NewTicker(redrawEvery)
	defer tick.Stop()
	var last progress
	for {
		select {
		case <-s.ctx.Done():
			return fmt.Errorf("interrupted; operation %s goes on, look again with `opfield ha operations %s %s --follow`", id, workload, id)
		case <-tick.C:
			v.tick(time.Now())
		case u, ok := <-news:
			if !ok {
				if s.ctx.Err() != nil {
					continue
				}
				if err := <-failed; err != nil {
					return err
				}
				return ended(last, workload)
			}
			if u.err != nil {
				s.say("the controller is away (%v); trying again", u.err)
				continue
			}
			last = u.progress
			if err := v.show(last, time.Now()); err != nil {
				return err
			}
		}
	}
}

// ended turns the result of an operation into that of the command.
func ended(p progress, workload string) error {
	op := p.Operation
	switch op.Status {
	case policy.Failed:
		return fmt.Errorf("operation %s failed: %s (%s); when the cause is mended, `opfield ha retry %s %s`", op.ID, printable(op.Message), op.Code, workload, op.ID)
	case policy.Cancelled:
		return fmt.Errorf("operation %s was cancelled: %s", op.ID, printable(outcome(op)))
	}
	return nil
}

// watchOperation sends every change of an operation until it is over.
func (c *client) watchOperation(ctx context.Context, workload string, op policy.Operation, news chan<- bulletin) error {
	last := progress{Operation: op}
	var have string
	for {
		p, tag, err := c.nextProgress(ctx, workload, have, last)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, errAway), isAway(err):
			have = ""
			select {
			case news <- bulletin{err: err}:
			case <-ctx.Done():
				return nil
			}
			select {
			case <-time.After(followAgain):
			case <-ctx.Done():
				return nil
			}
			continue
		case err != nil:
			return err
		case tag == have:
			continue
		}
		have, last = tag, p
		select {
		case news <- bulletin{progress: p}:
		case <-ctx.Done():
			return nil
		}
		if p.over() {
			return nil
		}
	}
}

// isAway reports whether the controller answered that it cannot work now.
func isAway(err error) bool {
	p, ok := errors.AsType[*api.Problem](err)
	return ok && p.Status == http.StatusServiceUnavailable
}

// nextProgress waits for the next change. The operation is in the policy's
// view while it is queued or at work, and in the history afterwards; a policy
// that is given up is gone with both.
func (c *client) nextProgress(ctx context.Context, workload, have string, last progress) (progress, string, error) {
	var v policy.View
	id := last.Operation.ID
	tag, err := c.poll(ctx, fmt.Sprintf("%s?wait=%d", at(workload, ""), pollSeconds), have, &v)
	p := progress{Health: v.Health, Placements: v.Placements}
	switch {
	case err != nil:
	case tag == have:
		return last, have, nil
	case v.Operation != nil && v.Operation.ID == id:
		p.Operation = *v.Operation
	default:
		if i := slices.IndexFunc(v.Queued, func(op policy.Operation) bool { return op.ID == id }); i >= 0 {
			p.Operation = v.Queued[i]
		} else {
			err = c.call(ctx, http.MethodGet, at(workload, "/operations/"+url.PathEscape(id)), nil, &p.Operation)
		}
	}
	if prob, ok := errors.AsType[*api.Problem](err); ok && prob.Status == http.StatusNotFound && last.Operation.Type == policy.Disable {
		last.Operation.Status, last.Operation.Phase, last.Operation.Progress, last.Operation.Note = policy.Completed, policy.Done, 100, ""
		last.Health, last.Placements = "", nil
		return last, "gone", nil
	}
	return p, tag, err
}

// viewer is one way of showing progress.
type viewer interface {
	show(progress, time.Time) error
	tick(time.Time)
}

func (s *session) viewer() viewer {
	f, _ := s.out.(*os.File)
	switch {
	case s.json:
		return &jsonLines{out: s.out}
	case f != nil && s.terminal():
		return &picture{out: f}
	default:
		return &textLines{out: s.out}
	}
}

// essence is what makes two reports of an operation different for people:
// times that count up are left out.
func (p progress) essence() string {
	p.Operation.Seen, p.Operation.Worked = time.Time{}, 0
	b, err := json.Marshal(p)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// head is the first line of every view.
func (p progress) head(now time.Time) string {
	op := p.Operation
	until := op.FinishedAt
	if until.IsZero() {
		until = now
	}
	return fmt.Sprintf("%s %s, %s", op.ID, summary(op), ageAt(op.CreatedAt, until))
}

// details are what an operation waits for and what failed before.
func (p progress) details(now time.Time) []string {
	op := p.Operation
	var out []string
	if op.Note != "" {
		out = append(out, op.Note)
	}
	if op.Attempts > 0 && !op.Status.Over() {
		text := fmt.Sprintf("attempt %d", op.Attempts+1)
		if left := op.Next.Sub(now).Round(time.Second); left > 0 && op.Status == policy.Waiting {
			text += " in " + left.String()
		}
		out = append(out, fmt.Sprintf("%s; the last one failed: %s (%s)", text, op.Message, op.Code))
	}
	if op.Result != "" {
		out = append(out, op.Result)
	}
	return out
}

func placementLine(p policy.PlacementView) string {
	text := fmt.Sprintf("%s: %s, %s, generation %d", p.Node, p.Want, placementWord(p), p.Generation)
	if p.Streams > 0 {
		text += fmt.Sprintf(", %d streams", p.Streams)
	}
	if why := placementReason(p); why != "" {
		text += ", " + why
	}
	return text
}

// phaseWords are the steps of an operation with the present one marked.
func phaseWords(op policy.Operation) []string {
	var out []string
	past := true
	for _, p := range policy.Phases() {
		switch {
		case p == op.Phase:
			past = false
			out = append(out, "["+phaseName(p)+"]")
		case past:
			out = append(out, "+"+phaseName(p))
		default:
			out = append(out, phaseName(p))
		}
	}
	return out
}

func bar(percent int) string {
	full := min(max(percent, 0), 100) * barCells / 100
	return "[" + strings.Repeat("#", full) + strings.Repeat(".", barCells-full) + "]"
}

// screen returns the size of a terminal.
func screen(f *os.File) (width, height int) {
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 || size.Row == 0 {
		return someWidth, someHeight
	}
	return int(size.Col), int(size.Row)
}
