package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/bus"
)

type auditCmd struct {
	List auditListCmd `cmd:"" default:"withargs" help:"List what was asked for, decided and done, oldest first."`
}

type auditListCmd struct {
	Workload string        `help:"Only what is about this workload." placeholder:"WORKLOAD"`
	Since    time.Duration `help:"Only what happened so long ago or later; 0s: everything that is kept." default:"24h"`
	Follow   bool          `short:"f" help:"Go on with what happens; a lost controller is waited for."`
}

func (c *auditListCmd) Run(s *session) error {
	if c.Since < 0 {
		return usageError(fmt.Sprintf("--since: %s; want a duration such as 1h", c.Since))
	}
	query := url.Values{}
	if c.Workload != "" {
		query.Set("workload", c.Workload)
	}
	if c.Since > 0 {
		query.Set("since", time.Now().Add(-c.Since).UTC().Format(time.RFC3339Nano))
	}
	for reached := false; ; {
		var list api.AuditList
		err := s.client.call(s.ctx, http.MethodGet, "/v1/audit?"+query.Encode(), nil, &list)
		switch {
		case err == nil:
			reached = true
		case s.ctx.Err() != nil && c.Follow:
			return nil
		case !c.Follow || !reached || !errors.Is(err, errAway) && !isAway(err):
			return err
		default:
			s.say("the controller is away (%v); trying again", err)
			select {
			case <-s.ctx.Done():
				return nil
			case <-time.After(followAgain):
			}
			continue
		}
		for _, m := range list.Events {
			if err := printAudit(s, m); err != nil {
				return err
			}
		}
		if list.Next > 0 {
			query.Del("since")
			query.Set("after", strconv.FormatUint(list.Next, 10))
		}
		switch {
		case list.More:
		case !c.Follow:
			return nil
		default:
			query.Set("wait", strconv.Itoa(pollSeconds))
		}
	}
}

// printAudit prints one line.
func printAudit(s *session, m bus.AuditMessage) error {
	if s.json {
		return json.NewEncoder(s.out).Encode(m)
	}
	e := m.Data
	what := strings.TrimSpace(e.Workload + " " + e.Node)
	text := strings.TrimSuffix(e.Text, ": ") // an operation that ended without anything to add
	if e.Code != "" && !strings.Contains(text, e.Code) {
		text += " (" + e.Code + ")"
	}
	if e.Who != "" {
		text += ", by " + e.Who
	}
	_, err := fmt.Fprintf(s.out, "%s  %-9s  %-30s  %s\n", when(m.Time), printable(string(e.Kind)), printable(what), printable(text))
	return err
}
