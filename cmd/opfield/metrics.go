package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const metricsWithin = 10 * time.Second

// serveMetrics answers /metrics, /healthz (the process runs) and /readyz (its
// streams are up to date) on ln until ctx ends. (OBS-1)
func serveMetrics(ctx context.Context, ln net.Listener, reg *prometheus.Registry, k *keeper) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !k.good.Load() {
			http.Error(w, "streams are not up to date", http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	})
	srv := &http.Server{Handler: mux, ReadTimeout: metricsWithin, WriteTimeout: metricsWithin}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ln) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	err := srv.Close()
	<-done
	return errors.Join(ctx.Err(), err)
}
