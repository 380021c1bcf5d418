package registry

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	requests  *prometheus.CounterVec
	collected prometheus.Counter
	stored    prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "opfield_registry_requests_total", Help: "Requests to the internal registry, by operation and result.",
		}, []string{"operation", "result"}),
		collected: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "opfield_registry_removed_bytes_total", Help: "Bytes of images not in use any more that were removed.",
		}),
		stored: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "opfield_registry_stored_bytes", Help: "Bytes of stored images, as of the last removal.",
		}),
	}
	if reg != nil {
		reg.MustRegister(m.requests, m.collected, m.stored)
	}
	return m
}
