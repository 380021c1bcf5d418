package ingress

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/upstream"
)

type metrics struct {
	applies   *prometheus.CounterVec
	duration  prometheus.Histogram
	routes    *prometheus.GaugeVec
	links     *prometheus.GaugeVec
	pending   prometheus.Gauge
	lastApply prometheus.Gauge
	malformed prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		applies:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "opfield_ingress_applies_total", Help: "Generations brought to nginx, by result."}, []string{"result"}),
		duration:  prometheus.NewHistogram(prometheus.HistogramOpts{Name: "opfield_ingress_apply_duration_seconds", Help: "From rendering to proof.", Buckets: []float64{.1, .25, .5, 1, 2, 5, 10, 30}}),
		routes:    prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "opfield_ingress_routes", Help: "Routes by health."}, []string{"health"}),
		links:     prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "opfield_ingress_links", Help: "Links by state."}, []string{"state"}),
		pending:   prometheus.NewGauge(prometheus.GaugeOpts{Name: "opfield_ingress_apply_pending", Help: "1 while a change waits for nginx."}),
		lastApply: prometheus.NewGauge(prometheus.GaugeOpts{Name: "opfield_ingress_last_apply_timestamp_seconds", Help: "When nginx last took a generation."}),
		malformed: prometheus.NewCounter(prometheus.CounterOpts{Name: "opfield_ingress_malformed_records_total", Help: "Routes and relays that could not be read."}),
	}
	for _, c := range []prometheus.Collector{m.applies, m.duration, m.routes, m.links, m.pending, m.lastApply, m.malformed} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) observe(s Status, orders []upstream.Order) {
	health := map[Health]float64{HealthOnline: 0, HealthOffline: 0, HealthRefused: 0}
	for _, r := range s.Routes {
		health[r.Health]++
	}
	for h, n := range health {
		m.routes.WithLabelValues(string(h)).Set(n)
	}
	states := map[upstream.State]float64{upstream.Open: 0, upstream.Joined: 0, upstream.Holding: 0, upstream.Closed: 0}
	for i := range orders {
		states[orders[i].State]++
	}
	for st, n := range states {
		m.links.WithLabelValues(st.String()).Set(n)
	}
	m.pending.Set(0)
	if s.Reload.Pending {
		m.pending.Set(1)
	}
}

func (m *metrics) applied(r result) {
	m.applies.WithLabelValues(r.word()).Inc()
	m.duration.Observe(r.took.Seconds())
	if r.err == nil {
		m.lastApply.Set(float64(time.Now().Unix()))
	}
}
