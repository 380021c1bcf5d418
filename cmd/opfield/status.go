package main

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
)

const watchEvery = time.Second

// What a terminal is told to show a picture in the place of the last one.
const (
	firstScreen = "\x1b[2J"
	topLeft     = "\x1b[H"
	restOfLine  = "\x1b[K"
	restOfAll   = "\x1b[J"
)

type statusCmd struct {
	Watch bool `short:"w" help:"Show it again every second until interrupted."`
	Links bool `help:"Show every link, not only those that are not open."`
}

func (c *statusCmd) Run(s *session) error {
	for first := true; ; first = false {
		var rep api.Report
		err := s.client.call(s.ctx, http.MethodGet, "/v1/status", nil, &rep)
		switch {
		case s.ctx.Err() != nil:
			return nil
		case err != nil && (first || !c.Watch):
			return err
		case err != nil && s.json: // a controller that restarts comes back
			s.say("%v; trying again", err)
			err = nil
		case err != nil:
			err = c.print(s, "WARNING "+printable(err.Error())+"\n", first)
		default:
			err = c.show(s, rep, first)
		}
		if err != nil || !c.Watch {
			return err
		}
		select {
		case <-s.ctx.Done():
			return nil
		case <-time.After(watchEvery):
		}
	}
}

func (c *statusCmd) show(s *session, rep api.Report, first bool) error {
	if s.json {
		return s.printJSON(rep)
	}
	var b strings.Builder
	if err := c.render(&b, rep); err != nil {
		return err
	}
	return c.print(s, b.String(), first)
}

// print writes a whole picture at once; on a terminal, over the last one.
func (c *statusCmd) print(s *session, text string, first bool) error {
	if c.Watch && s.terminal() {
		text = topLeft + strings.ReplaceAll(text, "\n", restOfLine+"\n") + restOfAll
		if first {
			text = firstScreen + text
		}
	}
	_, err := io.WriteString(s.out, text)
	return err
}

// render writes one table for each kind of thing.
func (c *statusCmd) render(w io.Writer, rep api.Report) error {
	for _, warning := range rep.Warnings {
		fmt.Fprintln(w, "WARNING", printable(warning))
	}
	fmt.Fprintf(w, "NATS %s\n", printable(rep.NATS))
	links, open := c.linkRows(rep.Ingresses)
	parts := [][][]string{nodeRows(rep.Nodes), relayRows(rep.Relays), ingressRows(rep.Ingresses), policyRows(rep.Policies), routeRows(rep.Routes), links}
	for _, rows := range parts {
		if len(rows) < 2 {
			continue
		}
		fmt.Fprintln(w)
		if err := table(w, rows); err != nil {
			return err
		}
	}
	if open > 0 && !c.Links {
		fmt.Fprintf(w, "\nopen links: %d (--links shows them)\n", open)
	}
	return nil
}

func nodeRows(nodes []api.NodeView) [][]string {
	rows := [][]string{{"NODE", "STATE", "AGE", "RELAYS", "DOCKER", "PLACEMENTS", "CERTIFICATE UNTIL", "REASON"}}
	for _, n := range nodes {
		reason := strings.Join(append([]string{n.Reason}, n.Warnings...), "; ")
		rows = append(rows, []string{nodeTitle(n), nodeState(n), age(n.Since), sessions(n.Relays), n.Docker, strconv.Itoa(len(n.Placements)), when(n.Expires), strings.TrimPrefix(reason, "; ")})
	}
	return rows
}

// sessions says how many relays are connected and why others are not.
func sessions(relays []bus.RelaySessionStatus) string {
	up := 0
	var bad []string
	for _, r := range relays {
		if r.Connected {
			up++
		} else {
			bad = append(bad, r.ID+": "+r.Err)
		}
	}
	out := fmt.Sprintf("%d/%d", up, len(relays))
	if len(bad) > 0 {
		out += " (" + strings.Join(bad, "; ") + ")"
	}
	return out
}

func relayRows(relays []api.ProcessView) [][]string {
	rows := [][]string{{"RELAY", "STATE", "ADDRESS", "SESSIONS", "STREAMS", "CERTIFICATE UNTIL"}}
	for _, p := range relays {
		row := []string{p.ID, string(p.State), "", "", "", when(p.Expires)}
		if r := p.Relay; r != nil {
			row[2], row[3], row[4] = r.Addr, strconv.Itoa(len(r.Sessions)), strconv.Itoa(r.Streams)
		}
		rows = append(rows, row)
	}
	return rows
}

func ingressRows(ingresses []api.ProcessView) [][]string {
	rows := [][]string{{"INGRESS", "STATE", "RELAYS", "NATS", "LINKS", "RELOAD", "RESULT", "AGE", "CERTIFICATE UNTIL"}}
	for _, p := range ingresses {
		row := []string{p.ID, string(p.State), "", "", "", "", "", "", when(p.Expires)}
		if i := p.Ingress; i != nil {
			row[2], row[3], row[4] = sessions(i.Relays), i.NATS, strconv.Itoa(len(i.Links))
			row[5], row[6], row[7] = i.Reload.Generation, reloadResult(i.Reload), age(i.Reload.At)
		}
		rows = append(rows, row)
	}
	return rows
}

func reloadResult(r bus.ReloadStatus) string {
	out := r.Result
	if r.Error != "" {
		out += ": " + r.Error
	}
	if r.Pending {
		out += " (another one waits)"
	}
	return out
}

func routeRows(routes []api.RouteView) [][]string {
	rows := [][]string{{"ROUTE", "HEALTH", "PLACEMENTS"}}
	for _, r := range routes {
		var health []string
		for _, on := range r.Ingresses {
			text := on.Ingress + "=" + on.Health
			if on.Error != "" {
				text += " (" + on.Error + ")"
			}
			health = append(health, text)
		}
		var where []string
		for _, e := range r.Placements {
			where = append(where, e.Node+"="+placementState(e))
		}
		rows = append(rows, []string{r.Name, strings.Join(health, ", "), strings.Join(where, ", ")})
	}
	return rows
}

func placementState(e placement.Event) string {
	switch {
	case e.Serves():
		return "serving"
	case e.Role != placement.RoleServing:
		return string(e.Role)
	case e.State == placement.StateRunning:
		return "not ready"
	default:
		return string(e.State)
	}
}

// linkRows has every link that is not open, with its reason, and counts those
// that are.
func (c *statusCmd) linkRows(ingresses []api.ProcessView) (rows [][]string, open int) {
	rows = [][]string{{"LINK", "INGRESS", "STATE", "AGE", "STREAMS", "ADDRESS", "REASON"}}
	for _, p := range ingresses {
		if p.Ingress == nil {
			continue
		}
		for _, l := range p.Ingress.Links {
			if l.State == "open" {
				open++
			}
			if c.Links || l.State != "open" {
				rows = append(rows, []string{l.Link, p.ID, l.State, age(l.Since), strconv.Itoa(l.Streams), l.Address, l.Reason})
			}
		}
	}
	return rows, open
}
