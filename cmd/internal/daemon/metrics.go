package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/opfield/availability/identity"
)

const (
	metricsWithin = 10 * time.Second
	tellTaken     = 3 * time.Second // a predecessor is gone by then
)

// NewRegistry returns a registry with what every process shows.
func NewRegistry(id *identity.Identity) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "opfield_certificate_expiry_timestamp_seconds", Help: "When the certificate of this process ends.",
		}, func() float64 { return float64(id.Expires().Unix()) }),
	)
	return reg
}

// MetricsFlags say where metrics are shown. The program sets the default:
// `set:"metrics=127.0.0.1:9100"`.
type MetricsFlags struct {
	Metrics         string `help:"Address of metrics and health; empty: none." default:"${metrics}"`
	MetricsAnywhere bool   `help:"Allow --metrics beyond loopback, without TLS."`
}

// CheckMetrics refuses an address that others reach, unless that is wanted:
// there is no TLS and no password. (SEC-4)
func (f MetricsFlags) CheckMetrics() error {
	if f.Metrics == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(f.Metrics)
	if err != nil {
		return UsageError(fmt.Sprintf("--metrics %q: want host:port, such as 127.0.0.1:9100", f.Metrics))
	}
	if ip := net.ParseIP(host); !f.MetricsAnywhere && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return UsageError(fmt.Sprintf("--metrics %q: want a loopback address, because it has no TLS; add --metrics-anywhere to bind it all the same", f.Metrics))
	}
	return nil
}

// Page is one more page beside the metrics.
type Page struct {
	Path    string
	Handler http.HandlerFunc
}

// ServeMetrics answers /metrics, /healthz (the process runs) and /readyz until
// ctx ends. It waits for an address that is taken, and says so once that cannot
// be a handover. An empty one serves nothing.
func (f MetricsFlags) ServeMetrics(ctx context.Context, log *slog.Logger, reg *prometheus.Registry, ready func() error, pages ...Page) error {
	if f.Metrics == "" {
		<-ctx.Done()
		return nil
	}
	told, begin := false, time.Now()
	for {
		ln, err := net.Listen("tcp", f.Metrics)
		if err == nil {
			return ServeMetricsOn(ctx, ln, reg, ready, pages...)
		}
		// The predecessor of a handover still has the port for a while.
		if !told && time.Since(begin) > tellTaken {
			told = true
			log.Warn("--metrics cannot be served, trying again; free the address or name another one", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// ServeMetricsOn is ServeMetrics on a listener, which it closes. (OBS-1)
func ServeMetricsOn(ctx context.Context, ln net.Listener, reg *prometheus.Registry, ready func() error, pages ...Page) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = fmt.Fprintln(w, "ok")
	})
	for _, p := range pages {
		mux.HandleFunc("GET "+p.Path, p.Handler)
	}
	srv := &http.Server{Handler: mux, ReadTimeout: metricsWithin, WriteTimeout: metricsWithin}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("metrics: %w", err)
	}
	return nil
}
