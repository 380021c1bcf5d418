// Command opfield is the controller and the tool to talk to it.
//
// `opfield serve` hosts the CA, the join endpoint, NATS, the API socket and
// metrics. Every other command is a client of the socket. Data goes to
// stdout, talk to stderr; the exit code is 0 if all is well, 1 if something
// failed and 2 for wrong use.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/opfield/availability/cmd/internal/daemon"
)

const (
	exitFailed = 1
	exitUsage  = 2
)

// app is the command line.
type app struct {
	Config kong.ConfigFlag `help:"YAML file with flag names as keys; unknown keys are errors." placeholder:"FILE"`
	Socket string          `help:"Socket of the controller." default:"/run/opfield/api.sock" type:"path"`
	JSON   bool            `help:"Print JSON."`

	Serve      serveCmd      `cmd:"" help:"Run the controller."`
	Join       joinCmd       `cmd:"" help:"Exchange a token for an identity."`
	Token      tokenCmd      `cmd:"" help:"Join tokens."`
	Route      routeCmd      `cmd:"" help:"Routes."`
	Cert       certCmd       `cmd:"" help:"Certificates of routes."`
	HA         haCmd         `cmd:"" name:"ha" help:"Make workloads highly available."`
	Status     statusCmd     `cmd:"" help:"Show nodes, relays, ingress nodes, available workloads, routes and links."`
	Workloads  workloadsCmd  `cmd:"" help:"Show every container and Compose project of every node, announced or not."`
	Events     eventsCmd     `cmd:"" help:"Show health events."`
	Audit      auditCmd      `cmd:"" help:"What was asked for, decided and done."`
	Nodes      nodesCmd      `cmd:"" help:"Nodes."`
	Identity   identityCmd   `cmd:"" help:"Identities of processes."`
	NATS       natsCmd       `cmd:"" name:"nats" help:"Use an own NATS cluster."`
	Demo       demoCmd       `cmd:"" help:"Try it out on this machine."`
	Completion completionCmd `cmd:"" help:"Print a completion script for a shell."`
	Version    versionCmd    `cmd:"" help:"Print the version."`
}

// session is what a command works with.
type session struct {
	ctx    context.Context
	client *client
	json   bool
	in     io.Reader
	out    io.Writer
	talk   io.Writer
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// exit unwinds kong, which wants to end the process for --help.
type exit int

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (code int) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case exit:
			code = int(r)
		default:
			panic(r)
		}
	}()
	var cli app
	parser, err := kong.New(&cli,
		kong.Name("opfield"),
		kong.Description("High availability for workloads on plain Docker hosts."),
		kong.DefaultEnvars(daemon.EnvPrefix),
		daemon.ServiceOnly("serve"),
		kong.Configuration(daemon.LoadConfig),
		kong.Writers(stdout, stderr),
		kong.Exit(func(c int) { panic(exit(c)) }),
		kong.UsageOnError(),
	)
	if err != nil {
		fmt.Fprintln(stderr, "opfield:", err)
		return exitFailed
	}
	kctx, err := parser.Parse(args)
	if err != nil {
		// A setting that may be left out is not one that may be empty.
		fmt.Fprintln(stderr, "opfield:", strings.Replace(err.Error(), `one of "",`, "one of ", 1))
		fmt.Fprintln(stderr, "see", daemon.HelpOf(err, "opfield"))
		return exitUsage
	}
	s := &session{ctx: ctx, client: newClient(cli.Socket, stderr), json: cli.JSON, in: os.Stdin, out: stdout, talk: stderr}
	verb := ""
	if n := kctx.Selected(); n != nil {
		verb = n.Name
	}
	err = kctx.Run(s, &cli, demoVerb(verb))
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		fmt.Fprintln(stderr, "opfield:", err)
		return exitUsage
	default:
		printError(stderr, err)
		return exitFailed
	}
}

// usageError is wrong use that kong cannot see.
type usageError string

func (e usageError) Error() string { return string(e) }

// version is set by the linker.
var version string

// builtVersion returns it, or what the build recorded: the module's version
// and, for a build from a work tree, the revision.
func builtVersion() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && (v == "" || v == "(devel)") {
			return s.Value
		}
	}
	return v
}

type versionCmd struct{}

func (versionCmd) Run(s *session) error {
	if s.json {
		return s.printJSON(map[string]string{"version": builtVersion()})
	}
	_, err := fmt.Fprintln(s.out, builtVersion())
	return err
}
