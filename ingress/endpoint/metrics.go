package endpoint

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	conns   *prometheus.CounterVec
	changes *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer, streams func() float64) *metrics {
	m := &metrics{
		conns: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "opfield_ingress_link_connections_total", Help: "Connections of nginx to link endpoints, by result.",
		}, []string{"result"}),
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "opfield_ingress_link_changes_total", Help: "State changes of link endpoints, by new state.",
		}, []string{"state"}),
	}
	if reg != nil {
		reg.MustRegister(m.conns, m.changes, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "opfield_ingress_link_streams", Help: "Streams that run now.",
		}, streams))
	}
	return m
}
