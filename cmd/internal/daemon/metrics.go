package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/opfield/availability/identity"
)

const metricsWithin = 10 * time.Second

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

// Page is one more page beside the metrics.
type Page struct {
	Path    string
	Handler http.HandlerFunc
}

// ServeMetrics answers /metrics, /healthz (the process runs) and /readyz on
// addr until ctx ends. An empty addr serves nothing.
func ServeMetrics(ctx context.Context, addr string, reg *prometheus.Registry, ready func() error, pages ...Page) error {
	if addr == "" {
		<-ctx.Done()
		return nil
	}
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
	var ln net.Listener
	for {
		var err error
		if ln, err = net.Listen("tcp", addr); err == nil {
			break
		}
		// The predecessor of a handover still has the port for a while.
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(500 * time.Millisecond):
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("metrics: %w", err)
	}
	return nil
}
