package relay

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	sessions *prometheus.GaugeVec
	streams  prometheus.Gauge
	opens    *prometheus.CounterVec
	refused  *prometheus.CounterVec
	dropped  *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		sessions: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "opfield_relay_sessions", Help: "Control sessions by role.",
		}, []string{"role"}),
		streams: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "opfield_relay_streams", Help: "Streams that are joined now.",
		}),
		opens: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "opfield_relay_opens_total", Help: "Streams asked for, by result.",
		}, []string{"result"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "opfield_relay_refused_connections_total", Help: "Connections refused before they were admitted, by reason.",
		}, []string{"reason"}),
		dropped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "opfield_relay_dropped_sessions_total", Help: "Sessions that ended, by role and reason.",
		}, []string{"role", "reason"}),
	}
	if reg != nil {
		reg.MustRegister(m.sessions, m.streams, m.opens, m.refused, m.dropped)
	}
	return m
}
