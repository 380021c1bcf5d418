// Command opfield-node is the agent of a Docker host.
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

	Join joinCmd `cmd:"" help:"Join this host as a node."`
	Run  runCmd  `cmd:"" help:"Run the agent."`
}

type joinCmd struct {
	daemon.Join
	IdentityDir string `help:"Folder for the identity." default:"/etc/opfield/identity" type:"path"`
}

// Run joins.
func (c *joinCmd) Run(ctx context.Context) error {
	return c.Join.Run(ctx, identity.RoleNode, c.IdentityDir, "", os.Stdout)
}

func main() {
	os.Exit(daemon.Main("opfield-node", "Announces the containers of this host and answers their links.", version, &cli{}))
}
