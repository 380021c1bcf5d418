// Package daemon is what the programs of a joined host share: flags, config
// file, joining, logs, metrics and the handover of sockets to a successor.
package daemon

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

// Exit codes.
const (
	ExitFailed = 1
	ExitUsage  = 2
)

// UsageError is wrong use that the flag parser cannot see.
type UsageError string

// Error implements error.
func (e UsageError) Error() string { return string(e) }

// Common are the flags that every daemon has.
type Common struct {
	IdentityDir string   `help:"Folder of this host's identity; join writes it." default:"/etc/opfield/identity" type:"path"`
	StateDir    string   `help:"Folder of the last known state." default:"/var/lib/opfield" type:"path"`
	NATS        []string `name:"nats" help:"NATS URLs instead of those learned at join." placeholder:"URL"`
	LogLevel    string   `help:"debug, info, warn or error." default:"info" enum:"debug,info,warn,error"`
	CheckConfig bool     `help:"Check the configuration and exit."`
}

// Logger returns the daemon's logger.
func (c Common) Logger(component string, w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.LogLevel)) // an enum has been checked
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level})).With("component", component)
}

// Join is the join command of a daemon.
type Join struct {
	Controller string `help:"host:port of the controller's join endpoint." required:"" placeholder:"HOST:8480"`
	Token      string `help:"Join token, or @FILE to read it from a file, or - for standard input: then it is in no process list." required:""`
	ID         string `name:"id" help:"Name of this host in the system; default: its host name."`
}

// Run joins and keeps the identity in dir.
func (j Join) Run(ctx context.Context, role identity.Role, dir, advertise string, out io.Writer) error {
	id := j.ID
	if id == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("--id: host name unknown, give the id: %w", err)
		}
		id, _, _ = strings.Cut(strings.ToLower(host), ".")
	}
	if err := placement.CheckName(id); err != nil {
		return UsageError(fmt.Sprintf("--id: %v", err))
	}
	if err := identity.CheckAddress(j.Controller); err != nil {
		return UsageError(fmt.Sprintf("--controller: %q: want host:port of the controller's join endpoint, such as ctrl.example:8480", j.Controller))
	}
	token, err := readToken(j.Token)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	who, err := identity.Join(ctx, identity.JoinRequest{
		Token: token, Controller: j.Controller, Name: identity.Name{Role: role, ID: id}, Advertise: advertise, Dir: dir,
	})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "joined as %s; identity in %s, valid until %s\n", who.Name(), dir, who.Expires().Format(time.RFC3339))
	return err
}

func readToken(arg string) (string, error) {
	var b []byte
	var err error
	switch file, isFile := strings.CutPrefix(arg, "@"); {
	case isFile:
		b, err = os.ReadFile(file)
	case arg == "-":
		b, err = io.ReadAll(io.LimitReader(os.Stdin, 4096))
	default:
		return arg, nil
	}
	if err != nil {
		return "", fmt.Errorf("--token: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// HelpOf names the help of the command that err, of the parser, is about.
func HelpOf(err error, name string) string {
	if p, ok := errors.AsType[*kong.ParseError](err); ok {
		for _, step := range p.Context.Path {
			if step.Command != nil {
				name += " " + step.Command.Name
			}
		}
	}
	return name + " --help"
}

// exit unwinds kong, which wants to end the process for --help.
type exit int

// Main runs the command line of the process and returns the exit code.
// Commands get a context.Context that ends with SIGTERM.
func Main(name, description, version string, cli any) int {
	return Run(name, description, version, cli, os.Args[1:], os.Stderr)
}

// Run parses args into cli, runs the chosen command and returns the exit code.
func Run(name, description, version string, cli any, args []string, stderr io.Writer) (code int) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case exit:
			code = int(r)
		default:
			panic(r)
		}
	}()
	fail := func(code int, err error) int {
		fmt.Fprintf(stderr, "%s: %v\n", name, err)
		return code
	}
	parser, err := kong.New(cli,
		kong.Name(name), kong.Description(description),
		kong.DefaultEnvars(EnvPrefix), kong.Configuration(LoadConfig),
		kong.Vars{"version": version}, kong.Exit(func(c int) { panic(exit(c)) }),
	)
	if err != nil {
		return fail(ExitFailed, err)
	}
	k, err := parser.Parse(args)
	if err != nil {
		return fail(ExitUsage, fmt.Errorf("%w; see %s", err, HelpOf(err, name)))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	k.BindTo(ctx, (*context.Context)(nil))
	err = k.Run()
	var usage UsageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		return fail(ExitUsage, err)
	default:
		return fail(ExitFailed, err)
	}
}

// OpenIdentity opens the identity that the daemon was joined with and refuses
// that of another role.
func (c Common) OpenIdentity(role identity.Role) (*identity.Identity, error) {
	id, err := identity.Open(c.IdentityDir)
	if errors.Is(err, identity.ErrNotJoined) {
		return nil, fmt.Errorf("identity in %s (--identity-dir): there is none; run opfield-%s join with a token first", c.IdentityDir, role)
	}
	if err != nil {
		return nil, fmt.Errorf("identity in %s (opfield-%s join makes it): %w", c.IdentityDir, role, err)
	}
	if id.Name().Role != role {
		return nil, fmt.Errorf("identity in %s is that of %s; one of the role %s is needed", c.IdentityDir, id.Name(), role)
	}
	return id, nil
}

// Instance returns a random number that names this process to the relays.
func Instance() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // it never fails (crypto/rand)
	return binary.BigEndian.Uint64(b[:])
}

// Ended returns err unless it says that a context ended, which is how every
// part of a daemon is told to stop.
func Ended(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
