package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/ingress"
	"github.com/opfield/availability/ingress/endpoint"
	"github.com/opfield/availability/securelink"
)

// sidecar is what the status is made of.
type sidecar struct {
	in     *ingress.Ingress
	set    *endpoint.Set
	relays *securelink.Relays
	conn   *bus.Conn
}

func (s sidecar) status() *bus.IngressStatus {
	own := s.in.Status()
	st := &bus.IngressStatus{
		Routes: []bus.RouteStatus{}, Links: []bus.LinkStatus{}, Relays: daemonRelays(s.relays.Status()),
		Reload: bus.ReloadStatus{Generation: own.Reload.Generation, At: own.Reload.At, Result: own.Reload.Result,
			Error: own.Reload.Error, Pending: own.Reload.Pending},
		NATS: "connected",
	}
	if !s.conn.Connected() {
		st.NATS = "not connected"
		if err := s.conn.LastError(); err != "" {
			st.NATS += ": " + err
		}
	}
	for _, r := range own.Routes {
		st.Routes = append(st.Routes, bus.RouteStatus{Name: r.Name, Health: string(r.Health), Error: r.Error})
	}
	for _, at := range own.CertificateExpiry {
		t, err := time.Parse(time.RFC3339, at)
		if err == nil && (st.CertificateExpiry.IsZero() || t.Before(st.CertificateExpiry)) {
			st.CertificateExpiry = t
		}
	}
	for _, l := range s.set.Status() {
		st.Links = append(st.Links, bus.LinkStatus{
			Link: l.Link.String(), Workload: l.Link.Placement.Workload, Address: l.Addr.String(),
			State: l.State.String(), Reason: l.Reason, Since: l.Since, Streams: l.Streams,
		})
	}
	return st
}

func daemonRelays(all []securelink.PeerStatus) []bus.RelaySessionStatus {
	out := make([]bus.RelaySessionStatus, 0, len(all))
	for _, p := range all {
		out = append(out, bus.RelaySessionStatus{ID: p.Relay.ID, Addr: p.Relay.Addr, Connected: p.Connected, Since: p.Since, Err: p.Err})
	}
	return out
}

// statusHandler answers with the status as JSON.
func statusHandler(s sidecar) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		_ = e.Encode(s.status())
	}
}

type statusCmd struct {
	Metrics string `help:"Address of the sidecar's metrics and health." default:"127.0.0.1:9102"`
}

// Run prints the status of the sidecar on this host.
func (c *statusCmd) Run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+c.Metrics+"/status", nil)
	if err != nil {
		return fmt.Errorf("--metrics: %w", err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("ask the sidecar (is it running, and does its --metrics match?): %w", err)
	}
	defer resp.Body.Close()
	_, err = io.Copy(os.Stdout, resp.Body)
	return err
}
