package registry

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
	noderegistry "github.com/opfield/availability/node/registry"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/securelink"
)

// TestMain also is the programs that the tests run on the hosts: a door whose
// credentials the test knows, and a writer of what is desired.
func TestMain(m *testing.M) {
	programs := map[string]func([]string) error{"door": door, "desire": desire, "source": source}
	if len(os.Args) > 1 {
		if program := programs[os.Args[1]]; program != nil {
			if err := program(os.Args[2:]); err != nil && !errors.Is(err, context.Canceled) {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			return
		}
	}
	os.Exit(m.Run())
}

// door runs a node's door: identity folder, listen address, relays as
// id=address.
func door(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	id, err := identity.Open(args[0])
	if err != nil {
		return err
	}
	log := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	relays := securelink.NewRelays(securelink.RelaysConfig{
		TLS: func(relay string) *tls.Config {
			return id.ClientTLS(identity.Name{Role: identity.RoleRelay, ID: relay})
		},
		Instance: uint64(time.Now().UnixNano()), Links: &securelink.LinkSet{}, Logger: log,
		Accept: func(in *securelink.Incoming) { in.Refuse(securelink.NotRegistered) },
	})
	var addrs []securelink.RelayAddress
	for _, a := range args[2:] {
		name, addr, _ := strings.Cut(a, "=")
		addrs = append(addrs, securelink.RelayAddress{ID: name, Addr: addr})
	}
	relays.Set(addrs)
	d, err := noderegistry.New(noderegistry.Config{Listen: args[1], Logger: log, Dial: func(ctx context.Context) (net.Conn, error) {
		return relays.DialService(ctx, placement.ServiceRegistry, id.ClientTLS(identity.ControllerName()))
	}})
	if err != nil {
		return err
	}
	log.Info("door", "auth", d.Auth())
	done := make(chan struct{})
	go func() { defer close(done); relays.Run(ctx) }()
	err = d.Run(ctx)
	<-done
	return err
}

// desire writes what is desired of a node: the controller's store identity,
// the URL of NATS, the node, and the records by workload as JSON.
func desire(args []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	id, err := identity.Open(args[0])
	if err != nil {
		return err
	}
	var want map[string]placement.Desired
	if err := json.Unmarshal([]byte(args[3]), &want); err != nil {
		return err
	}
	store, err := bus.OpenStore(bus.Config{URLs: args[1:2], Identity: id, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer store.Close()
	for {
		err := store.KeepDesired(ctx, args[2], want)
		if err == nil || ctx.Err() != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}
