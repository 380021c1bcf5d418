// Command opfield-ingress is the sidecar of nginx on an ingress node.
//
// SIGHUP restarts it without refusing a connection: the successor takes the
// socket of the link endpoints, running streams finish in the old process.
package main

import (
	"context"
	"os"
	"runtime"

	"github.com/alecthomas/kong"

	"github.com/opfield/availability/cmd/internal/daemon"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/ingress/guard"
)

// version is set by the linker.
var version = "dev"

type cli struct {
	Config  kong.ConfigFlag  `help:"YAML file with flag names as keys; unknown keys are errors." placeholder:"FILE"`
	Version kong.VersionFlag `help:"Print the version." env:"-"`

	Join   joinCmd   `cmd:"" help:"Join this host as an ingress node."`
	Run    runCmd    `cmd:"" help:"Run the sidecar."`
	Status statusCmd `cmd:"" help:"Show what the sidecar on this host knows, as JSON; needs no controller."`
	Guard  guardCmd  `cmd:"" hidden:"" help:"Hold nginx's connections; started by run."`
}

type joinCmd struct {
	daemon.Join
	IdentityDir string `help:"Folder for the identity." default:"/etc/opfield/identity" type:"path"`
}

// Run joins.
func (c *joinCmd) Run(ctx context.Context) error {
	return c.Join.Run(ctx, identity.RoleIngress, c.IdentityDir, "", os.Stdout)
}

type guardCmd struct{}

// Run is the guard process.
func (guardCmd) Run() error {
	runtime.GOMAXPROCS(1) // it does one thing at a time
	return guard.Serve(3)
}

func main() {
	os.Exit(daemon.Main("opfield-ingress", "Keeps nginx routing to what serves.", version, &cli{}))
}
