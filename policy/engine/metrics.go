package engine

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	leading    prometheus.Gauge
	decisions  prometheus.Counter
	pass       prometheus.Histogram
	operations *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		leading:   prometheus.NewGauge(prometheus.GaugeOpts{Name: "opfield_policy_leading", Help: "1 while this controller decides about policies."}),
		decisions: prometheus.NewCounter(prometheus.CounterOpts{Name: "opfield_policy_decisions_total", Help: "Decisions about policies."}),
		pass: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "opfield_policy_pass_seconds", Help: "Time to look at every policy.", Buckets: []float64{.001, .01, .05, .1, .5, 1, 5},
		}),
		operations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "opfield_policy_operations_total", Help: "Operations that ended, by type and status.",
		}, []string{"type", "status"}),
	}
	if r != nil {
		r.MustRegister(m.leading, m.decisions, m.pass, m.operations)
	}
	return m
}
