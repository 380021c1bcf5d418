package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/opfield/availability/e2e/demo"
)

const demoWithin = 70 * time.Second // the demo gives up after 60

// demoCmd shows the product on hosts of its own.
type demoCmd struct {
	Control string `help:"Socket of the running demo." default:"/run/opfield-demo.sock" type:"path"`

	Run            demoRunCmd  `cmd:"" default:"withargs" help:"Run the demo (needs root)."`
	Cut            demoVerbCmd `cmd:"" help:"Cut a node off the network."`
	Heal           demoVerbCmd `cmd:"" help:"Put a node back on the network."`
	KillContainer  demoVerbCmd `cmd:"" help:"Kill the container on a node."`
	StartContainer demoVerbCmd `cmd:"" help:"Start the container on a node again."`
	StopRelay      demoVerbCmd `cmd:"" help:"Stop a relay."`
	StartRelay     demoVerbCmd `cmd:"" help:"Start a relay again."`
	Status         demoShowCmd `cmd:"" help:"Show opfield status of the demo."`
}

type demoRunCmd struct {
	Once bool   `help:"End after the first cut; exit code 0 only if nothing failed that must not."`
	Port uint16 `help:"Port on 127.0.0.1 that leads to the demo's nginx." default:"8080"`
}

// Run runs the demo.
func (c *demoRunCmd) Run(s *session, cli *app) error {
	if os.Geteuid() != 0 {
		return errors.New("the demo makes network namespaces and starts Docker engines: run it as root")
	}
	return demo.Run(s.ctx, demo.Config{Once: c.Once, Port: c.Port, Socket: cli.Demo.Control, Out: s.out})
}

type demoVerbCmd struct {
	Target string `arg:"" optional:"" help:"node-1, node-2 or node-3; for relays relay-1 or relay-2. Default: the first, or the one that is cut off or stopped."`
}

// Run sends the verb to the running demo.
func (c *demoVerbCmd) Run(s *session, cli *app, verb demoVerb) error {
	_, err := askDemo(s.ctx, cli.Demo.Control, http.MethodPost, "/"+string(verb)+"?target="+url.QueryEscape(c.Target))
	return err
}

type demoShowCmd struct{}

// Run prints the demo's status.
func (demoShowCmd) Run(s *session, cli *app) error {
	out, err := askDemo(s.ctx, cli.Demo.Control, http.MethodGet, "/status")
	if err != nil {
		return err
	}
	_, err = fmt.Fprint(s.out, out)
	return err
}

// demoVerb is the name of the chosen command.
type demoVerb string

func askDemo(ctx context.Context, socket, method, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, demoWithin)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	req, err := http.NewRequestWithContext(ctx, method, "http://demo"+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	switch _, dialed := errors.AsType[*net.OpError](err); {
	case dialed:
		return "", fmt.Errorf("no demo answers on %s; start one with make demo: %w", socket, err)
	case err != nil:
		return "", fmt.Errorf("the demo has not answered; its own terminal says what it is doing: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(strings.TrimSpace(string(body)))
	}
	return string(body), err
}
