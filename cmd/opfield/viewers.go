package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/opfield/availability/policy"
)

// jsonLines prints one object for each change.
type jsonLines struct {
	out  io.Writer
	last string
}

func (v *jsonLines) tick(time.Time) {}

func (v *jsonLines) show(p progress, _ time.Time) error {
	if text := p.essence(); text != v.last {
		v.last = text
		return json.NewEncoder(v.out).Encode(p)
	}
	return nil
}

// textLines prints one line for each change, of the operation and of each
// placement.
type textLines struct {
	out        io.Writer
	head       string
	placements map[string]string // last line of each
}

func (v *textLines) tick(time.Time) {}

func (v *textLines) show(p progress, now time.Time) error {
	var b strings.Builder
	op := p.Operation
	head := strings.Join(append([]string{op.ID + " " + summary(op)}, p.lasting()...), "; ")
	if head != v.head {
		v.head = head
		fmt.Fprintln(&b, printable(strings.Join(append([]string{p.head(now)}, p.details(now)...), "; ")))
	}
	next := map[string]string{}
	for _, pl := range p.Placements {
		next[pl.Node] = placementLine(pl)
		if next[pl.Node] != v.placements[pl.Node] {
			fmt.Fprintln(&b, "  "+printable(next[pl.Node]))
		}
	}
	for _, pl := range slices.Sorted(maps.Keys(v.placements)) {
		if _, still := next[pl]; !still {
			fmt.Fprintln(&b, "  "+printable(pl+": removed"))
		}
	}
	v.placements = next
	_, err := io.WriteString(v.out, b.String())
	return err
}

// lasting are the details without what counts down.
func (p progress) lasting() []string {
	p.Operation.Next = time.Time{}
	return p.details(time.Time{})
}

// picture draws the progress in place.
type picture struct {
	out   *os.File
	last  progress
	shown bool // there is something to show
	lines int  // on the screen now
}

func (v *picture) tick(now time.Time) {
	if v.shown {
		_ = v.draw(now) // a terminal that is gone is seen by the next change
	}
}

func (v *picture) show(p progress, now time.Time) error {
	v.last, v.shown = p, true
	return v.draw(now)
}

func (v *picture) draw(now time.Time) error {
	width, height := screen(v.out)
	lines := v.last.lines(now, width-1) // the last column stays free: some terminals wrap there
	if len(lines) > height-1 {
		lines = lines[:max(height-1, 1)]
	}
	var b strings.Builder
	if v.lines > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", v.lines)
	}
	b.WriteString("\r")
	for _, line := range lines {
		b.WriteString(line + restOfLine + "\n")
	}
	b.WriteString(restOfAll)
	v.lines = len(lines)
	_, err := io.WriteString(v.out, b.String())
	return err
}

// lines are the whole picture, none wider than width.
func (p progress) lines(now time.Time, width int) []string {
	out := []string{p.head(now)}
	if !p.over() {
		out = append(out, wrap(phaseWords(p.Operation), width)...)
	}
	out = append(out, fmt.Sprintf("  %s %d %%", bar(p.Operation.Progress), p.Operation.Progress))
	for _, d := range p.details(now) {
		out = append(out, wrap(strings.Fields(printable(d)), width)...)
	}
	for _, pl := range p.Placements {
		out = append(out, "  "+placementLine(pl))
	}
	if p.Operation.Status == policy.Failed {
		out = append(out, fmt.Sprintf("  %s (%s)", p.Operation.Message, p.Operation.Code))
	}
	for i := range out {
		out[i] = cut(printable(out[i]), width)
	}
	return out
}

// wrap joins words into lines.
func wrap(words []string, width int) []string {
	var out []string
	line := " "
	for _, w := range words {
		if columns(line)+1+columns(w) > width && line != " " {
			out, line = append(out, line), " "
		}
		line += " " + w
	}
	return append(out, line)
}

// cut ends a text at a column.
func cut(s string, width int) string {
	at := 0
	for i, r := range s {
		if at += runeColumns(r); at > width {
			return s[:i]
		}
	}
	return s
}

func columns(s string) int {
	n := 0
	for _, r := range s {
		n += runeColumns(r)
	}
	return n
}

// runeColumns counts generously: a line that is too short does no harm, one
// that wraps spoils the picture.
func runeColumns(r rune) int {
	switch {
	case unicode.Is(unicode.Mn, r):
		return 0
	case r >= 0x1100:
		return 2
	}
	return 1
}
