package main

import (
	"net/http"

	"github.com/opfield/availability/api"
)

type nodesCmd struct {
	List nodesListCmd `cmd:"" default:"1" help:"List nodes."`
}

type nodesListCmd struct{}

func (nodesListCmd) Run(s *session) error {
	var out struct {
		Nodes []api.NodeView `json:"nodes"`
	}
	if err := s.client.call(s.ctx, http.MethodGet, "/v1/nodes", nil, &out); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(out)
	}
	return table(s.out, nodeRows(out.Nodes))
}
