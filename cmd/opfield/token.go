package main

import (
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/identity"
)

type tokenCmd struct {
	Create tokenCreateCmd `cmd:"" help:"Create a one-time token with which a process joins."`
	List   tokenListCmd   `cmd:"" help:"List tokens."`
	Revoke tokenRevokeCmd `cmd:"" help:"Make a token useless."`
}

type tokenCreateCmd struct {
	Role      string        `help:"Role of the process." required:"" enum:"node,relay,ingress,subscriber"`
	ID        string        `name:"id" help:"The only id it may take; needed to replace an identity that exists."`
	Workloads string        `help:"Workloads a node may announce, such as shop,team-*." placeholder:"PATTERNS"`
	TTL       time.Duration `name:"ttl" help:"How long it can be used." default:"1h"`
}

func (c *tokenCreateCmd) Run(s *session) error {
	order := api.TokenOrder{Role: identity.Role(c.Role), ID: c.ID, Workloads: c.Workloads, TTL: c.TTL.String()}
	var out api.NewToken
	if err := s.client.call(s.ctx, http.MethodPost, "/v1/tokens", order, &out); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(out)
	}
	s.say("works once, until %s:", out.For.Expires.Local().Format(time.DateTime))
	_, err := fmt.Fprintln(s.out, out.Text)
	return err
}

type tokenListCmd struct{}

func (tokenListCmd) Run(s *session) error {
	var out struct {
		Tokens []identity.Token `json:"tokens"`
	}
	if err := s.client.call(s.ctx, http.MethodGet, "/v1/tokens", nil, &out); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(out)
	}
	rows := [][]string{{"TOKEN", "ROLE", "FOR ID", "WORKLOADS", "EXPIRES", "USED BY"}}
	for _, t := range out.Tokens {
		rows = append(rows, []string{t.ID, string(t.Role), t.Bound, t.Grant.String(), when(t.Expires), t.Used})
	}
	return table(s.out, rows)
}

type tokenRevokeCmd struct {
	ID string `arg:"" help:"First part of the token, as listed."`
}

func (c *tokenRevokeCmd) Run(s *session) error {
	return s.client.call(s.ctx, http.MethodDelete, "/v1/tokens/"+url.PathEscape(c.ID), nil, nil)
}

func when(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Local().Format(time.DateTime)
}

func age(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return time.Since(t).Round(time.Second).String()
}
