// Package apitest has what tests of the API and of its clients need: a server
// on a real socket, and a policy engine that keeps what it is asked for.
package apitest

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
)

// Server is a running API with a CA and NATS of its own.
type Server struct {
	CA     *identitytest.CA
	NATS   *bustest.Server
	Socket string
}

// Start runs an API until the test ends. The policy engine may be nil.
func Start(t *testing.T, engine api.Availability, log *slog.Logger) *Server {
	t.Helper()
	ca := identitytest.New(t)
	s := &Server{CA: ca, NATS: bustest.Start(t, ca), Socket: filepath.Join(t.TempDir(), "api.sock")}
	fleet, err := api.NewFleet(api.FleetConfig{Conn: s.NATS.Controller, Store: s.NATS.Store, Members: ca.Members, Logger: log})
	require.NoError(t, err)
	audit, err := bus.NewAuditLog(bus.AuditConfig{Store: s.NATS.Store, Logger: log})
	require.NoError(t, err)
	srv, err := api.New(api.Config{
		Audit: audit.Add,
		Conn:  s.NATS.Controller, Store: s.NATS.Store, CA: ca.CA, Fleet: fleet, CheckRoute: checkRoute, Availability: engine, Logger: log,
	})
	require.NoError(t, err)
	ln, err := api.Listen(s.Socket)
	require.NoError(t, err)
	bustest.Go(t, fleet.Run)
	bustest.Go(t, audit.Run)
	bustest.Go(t, func(ctx context.Context) error { return srv.Serve(ctx, ln) })
	return s
}

// checkRoute stands for the checker that cmd injects: names only.
func checkRoute(raw json.RawMessage) (string, json.RawMessage, error) {
	var r map[string]any
	if err := json.Unmarshal(raw, &r); err != nil {
		return "", nil, errors.New("want an object")
	}
	name, _ := r["name"].(string)
	if placement.CheckName(name) != nil {
		return "", nil, api.Violations{{Code: "ROUTE_NAME_INVALID", Field: "name", Message: "want a name"}}
	}
	b, err := json.Marshal(r)
	return name, b, err
}
