// Command opfield-relay joins the connections of ingress nodes and nodes.
//
// SIGHUP restarts it without losing a stream: the successor takes the
// listening socket, peers are told, running streams finish in the old process.
package main

import (
	"context"
	"os"

	"github.com/alecthomas/kong"

	"github.com/opfield/availability/cmd/internal/daemon"
	"github.com/opfield/availability/identity"
)

// version is set by the linker.
var version = "dev"

type cli struct {
	Config  kong.ConfigFlag  `help:"YAML file with flag names as keys; unknown keys are errors." placeholder:"FILE"`
	Version kong.VersionFlag `help:"Print the version." env:"-"`

	Join joinCmd `cmd:"" help:"Join this host as a relay."`
	Run  runCmd  `cmd:"" help:"Run the relay."`
}

type joinCmd struct {
	daemon.Join
	IdentityDir string `help:"Folder for the identity." default:"/etc/opfield/identity" type:"path"`
	Advertise   string `help:"host:port under which nodes and ingress nodes reach this relay." required:"" placeholder:"HOST:9443"`
}

// Run joins.
func (c *joinCmd) Run(ctx context.Context) error {
	return c.Join.Run(ctx, identity.RoleRelay, c.IdentityDir, c.Advertise, os.Stdout)
}

func main() {
	os.Exit(daemon.Main("opfield-relay", "Carries secure links between ingress nodes and nodes.", version, &cli{}))
}
