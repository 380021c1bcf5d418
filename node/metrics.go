package node

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/placement"
)

// metrics of the agent. Without a registerer they are counted and shown
// nowhere.
type metrics struct {
	placements *prometheus.GaugeVec // by state and readiness
	published  prometheus.Counter
	failures   prometheus.Counter
	engineUp   prometheus.Gauge
	warnings   prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		placements: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "opfield_node_placements", Help: "Placements of this node by state.",
		}, []string{"state", "role", "ready"}),
		published: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "opfield_node_events_published_total", Help: "Health events that were stored.",
		}),
		failures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "opfield_node_publish_failures_total", Help: "Attempts to publish a health event that failed; each is repeated.",
		}),
		engineUp: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "opfield_node_docker_up", Help: "1 while the Docker daemon answers.",
		}),
		warnings: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "opfield_node_warnings", Help: "Containers that are not announced, and names that wait for a certificate.",
		}),
	}
	if reg != nil {
		reg.MustRegister(m.placements, m.published, m.failures, m.engineUp, m.warnings)
	}
	return m
}

// show takes the present state.
func (m *metrics) show(s Status) {
	m.placements.Reset()
	for _, e := range s.Placements {
		if e.State != placement.StateRemoved {
			ready := "false"
			if e.Ready {
				ready = "true"
			}
			m.placements.WithLabelValues(string(e.State), string(e.Role), ready).Inc()
		}
	}
	m.warnings.Set(float64(len(s.Warnings)))
	m.engineUp.Set(0)
	if s.Docker == dockerOK {
		m.engineUp.Set(1)
	}
}
