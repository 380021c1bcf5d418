package main

import (
	"net/http"

	"github.com/opfield/availability/identity"
)

type identityCmd struct {
	List   identityListCmd   `cmd:"" help:"List everyone who joined."`
	Revoke identityRevokeCmd `cmd:"" help:"Withdraw an identity; its open sessions end."`
}

type identityListCmd struct{}

func members(s *session) ([]identity.Member, error) {
	var out struct {
		Identities []identity.Member `json:"identities"`
	}
	err := s.client.call(s.ctx, http.MethodGet, "/v1/identities", nil, &out)
	return out.Identities, err
}

func (identityListCmd) Run(s *session) error {
	all, err := members(s)
	if err != nil {
		return err
	}
	if s.json {
		return s.printJSON(map[string]any{"identities": all})
	}
	rows := [][]string{{"IDENTITY", "WORKLOADS", "ADDRESS", "JOINED", "EXPIRES", "STATE"}}
	for _, m := range all {
		state := "good"
		if m.Revoked {
			state = "revoked"
		}
		rows = append(rows, []string{m.Name.String(), m.Grant.String(), m.Advertise, when(m.Joined), when(m.NotAfter), state})
	}
	return table(s.out, rows)
}

type identityRevokeCmd struct {
	Name string `arg:"" help:"<role>/<id>, such as node/node-1."`
}

func (c *identityRevokeCmd) Run(s *session) error {
	name, err := identity.ParseName(c.Name)
	if err != nil {
		return usageError(err.Error())
	}
	if err := s.client.call(s.ctx, http.MethodPost, "/v1/identities/revoke", name, nil); err != nil {
		return err
	}
	s.say("%s is revoked; join it again with a new token to use it again", name)
	return nil
}
