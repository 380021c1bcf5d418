package carry

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opfield/availability/placement"
)

// metrics of carrying out. Without a registerer they are counted and shown
// nowhere.
type metrics struct {
	carrier *Carrier
	wanted  *prometheus.Desc
	faults  *prometheus.Desc
	starts  prometheus.Counter
	outside prometheus.Counter
}

func newMetrics(c *Carrier, reg prometheus.Registerer) *metrics {
	m := &metrics{
		carrier: c,
		wanted:  prometheus.NewDesc("opfield_node_wanted", "Placements of this node by what is wanted of them, and whether it is so.", []string{"want", "done"}, nil),
		faults:  prometheus.NewDesc("opfield_node_faults", "Placements that are not as wanted, by the code of the reason.", []string{"code"}, nil),
		starts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "opfield_node_container_starts_total", Help: "Containers that the agent started.",
		}),
		outside: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "opfield_node_outside_changes_total", Help: "Changes made by hand that the agent repaired.",
		}),
	}
	if reg != nil {
		reg.MustRegister(m, m.starts, m.outside)
	}
	return m
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(out chan<- *prometheus.Desc) {
	out <- m.wanted
	out <- m.faults
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(out chan<- prometheus.Metric) {
	select {
	case <-m.carrier.opened:
	default:
		return
	}
	type key struct {
		want placement.Want
		done string
	}
	wanted, faults := map[key]int{}, map[string]int{}
	pages := m.carrier.book.all()
	m.carrier.mu.Lock()
	for workload, s := range m.carrier.shown {
		d := pages[workload].Desired
		if d == nil {
			continue
		}
		done := "false"
		if s.observed.Done {
			done = "true"
		}
		wanted[key{d.Want, done}]++
		if f := s.observed.Fault; f != nil {
			faults[f.Code]++
		}
	}
	m.carrier.mu.Unlock()
	for k, n := range wanted {
		out <- prometheus.MustNewConstMetric(m.wanted, prometheus.GaugeValue, float64(n), string(k.want), k.done)
	}
	for code, n := range faults {
		out <- prometheus.MustNewConstMetric(m.faults, prometheus.GaugeValue, float64(n), code)
	}
}
