package main

import (
	"net/http"
	"net/url"

	"github.com/opfield/availability/api"
)

type nodesCmd struct {
	List        nodesListCmd    `cmd:"" default:"1" help:"List nodes."`
	Drain       nodesDrainCmd   `cmd:"" help:"Move every placement away from a node and choose it no more."`
	Undrain     nodesUndrainCmd `cmd:"" help:"Let a node be chosen again."`
	Remove      nodesRemoveCmd  `cmd:"" help:"Forget a node that no policy uses."`
	Rename      nodesRenameCmd  `cmd:"" help:"Set the name under which a node is shown; its id stays."`
	ConfirmLost nodesLostCmd    `cmd:"" help:"Say that a silent node is lost, so that its placements are replaced. Be sure that nothing runs there any more."`
}

type nodesListCmd struct{}

func (nodesListCmd) Run(s *session) error {
	var out api.NodeList
	if err := s.client.call(s.ctx, http.MethodGet, "/v1/nodes", nil, &out); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(out)
	}
	return table(s.out, nodeRows(out.Nodes))
}

// tell asks something of a node and says what comes of it.
func tell(s *session, method, node, tail string, body any, format string, args ...any) error {
	if err := s.client.call(s.ctx, method, "/v1/nodes/"+url.PathEscape(node)+tail, body, nil); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(struct{}{})
	}
	s.say(format, args...)
	return nil
}

type nodesDrainCmd struct {
	Node string `arg:"" help:"Id of the node."`
}

func (c *nodesDrainCmd) Run(s *session) error {
	return tell(s, http.MethodPost, c.Node, "/drain", nil, "node %s is chosen no more; its placements move away, see `opfield ha list`", c.Node)
}

type nodesUndrainCmd struct {
	Node string `arg:"" help:"Id of the node."`
}

func (c *nodesUndrainCmd) Run(s *session) error {
	return tell(s, http.MethodPost, c.Node, "/undrain", nil, "node %s may be chosen again", c.Node)
}

type nodesRemoveCmd struct {
	Node string `arg:"" help:"Id of the node."`
}

func (c *nodesRemoveCmd) Run(s *session) error {
	return tell(s, http.MethodDelete, c.Node, "", nil, "node %s is removed", c.Node)
}

type nodesRenameCmd struct {
	Node string `arg:"" help:"Id of the node."`
	Name string `arg:"" help:"Name to show; empty: none."`
}

func (c *nodesRenameCmd) Run(s *session) error {
	if c.Name == "" {
		return tell(s, http.MethodPut, c.Node, "/name", api.NodeName{}, "node %s is shown by its id alone", c.Node)
	}
	return tell(s, http.MethodPut, c.Node, "/name", api.NodeName{Name: c.Name}, "node %s is shown as %s", c.Node, printable(c.Name))
}

type nodesLostCmd struct {
	Node string `arg:"" help:"Id of the node."`
}

func (c *nodesLostCmd) Run(s *session) error {
	return tell(s, http.MethodPost, c.Node, "/confirm-lost", nil, "node %s counts as lost; its placements are replaced, see `opfield ha list`", c.Node)
}
