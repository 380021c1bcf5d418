package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/opfield/availability/identity"
)

const maxTokenFile = 4 << 10

// joinCmd joins any role. The daemons have a join command of their own; this
// one is for subscribers and for preparing an identity elsewhere.
type joinCmd struct {
	Role        string `help:"Role the token is for." default:"subscriber" enum:"node,relay,ingress,subscriber"`
	ID          string `name:"id" help:"Id of this process." required:""`
	Controller  string `help:"host:port of the controller's join endpoint." required:""`
	Token       string `help:"Token; prefer --token-file, which other users do not see."`
	TokenFile   string `help:"File with the token; - is standard input." placeholder:"FILE"`
	Advertise   string `help:"Relays: host:port that others dial."`
	IdentityDir string `help:"Folder the identity is kept in." default:"/etc/opfield/identity" type:"path"`
}

func (c *joinCmd) Run(s *session) error {
	if err := identity.CheckAddress(c.Controller); err != nil {
		return usageError(fmt.Sprintf("--controller: %q: want host:port of the controller's join endpoint, such as ctrl.example:8480", c.Controller))
	}
	token, err := c.token()
	if err != nil {
		return err
	}
	id, err := identity.Join(s.ctx, identity.JoinRequest{
		Token: token, Controller: c.Controller, Advertise: c.Advertise, Dir: c.IdentityDir,
		Name: identity.Name{Role: identity.Role(c.Role), ID: c.ID},
	})
	if err != nil {
		return err
	}
	s.say("joined as %s; the identity is in %s", id.Name(), id.Dir())
	return nil
}

func (c *joinCmd) token() (string, error) {
	if (c.Token == "") == (c.TokenFile == "") {
		return "", usageError("--token-file: want it or --token, one of the two")
	}
	if c.Token != "" {
		return c.Token, nil
	}
	in := io.Reader(os.Stdin)
	if c.TokenFile != "-" {
		f, err := os.Open(c.TokenFile)
		if err != nil {
			return "", fmt.Errorf("--token-file: %w", err)
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxTokenFile))
	if err != nil {
		return "", fmt.Errorf("--token-file: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}
