package bus

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
)

const (
	auditKept = 90 * 24 * time.Hour
	maxAudits = 512 << 20
	// auditQueue holds what happens while NATS is away: a thousand policies
	// that are healed give some ten events each.
	auditQueue  = 16 << 10
	auditWithin = 3 * time.Second
	auditAgain  = 500 * time.Millisecond
	auditFlush  = 2 * time.Second // at the end of the process
)

// Why an audit event was not stored; the label of the metric.
const (
	auditDropFull    = "full"    // too many waited
	auditDropRefused = "refused" // NATS did not take it
	auditDropStopped = "stopped" // the process ended before NATS was back
)

// AuditConfig configures an AuditLog.
type AuditConfig struct {
	Queue      int    // events that wait; 0: 16384
	Store      *Store // required
	Logger     *slog.Logger
	Registerer prometheus.Registerer // nil: no metrics
}

// AuditLog stores audit events. Adding one waits for nothing.
type AuditLog struct {
	cfg      AuditConfig
	instance string // of this process
	events   chan AuditEvent
	dropped  *prometheus.CounterVec
	stored   prometheus.Counter
}

// NewAuditLog returns an AuditLog that keeps what is added until Run stores it.
func NewAuditLog(cfg AuditConfig) (*AuditLog, error) {
	if cfg.Store == nil || cfg.Logger == nil {
		return nil, errors.New("audit log: store and logger are required")
	}
	if cfg.Queue == 0 {
		cfg.Queue = auditQueue
	}
	var id [8]byte
	if _, err := rand.Read(id[:]); err != nil {
		return nil, err
	}
	l := &AuditLog{
		cfg: cfg, instance: hex.EncodeToString(id[:]), events: make(chan AuditEvent, cfg.Queue),
		dropped: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "opfield_audit_dropped_total", Help: "Audit events that were not stored, by reason."}, []string{"reason"}),
		stored:  prometheus.NewCounter(prometheus.CounterOpts{Name: "opfield_audit_stored_total", Help: "Audit events that were stored."}),
	}
	for _, reason := range []string{auditDropFull, auditDropRefused, auditDropStopped} {
		l.dropped.WithLabelValues(reason)
	}
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(l.dropped, l.stored, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "opfield_audit_waiting", Help: "Audit events that wait to be stored.",
		}, func() float64 { return float64(len(l.events)) }))
	}
	return l, nil
}

// Add takes an event and returns at once; one for which there is no room is
// counted. A time that is missing is now.
func (l *AuditLog) Add(e AuditEvent) {
	if e.At.IsZero() {
		e.At = time.Now()
	}
	select {
	case l.events <- e:
	default:
		l.dropped.WithLabelValues(auditDropFull).Inc()
	}
}

// Run stores what is added, in its order, until ctx ends. While NATS is away
// it is tried again; every event has an id by which one that was stored
// already is known.
func (l *AuditLog) Run(ctx context.Context) error {
	for number := uint64(1); ; number++ {
		select {
		case <-ctx.Done():
			l.flush(ctx, number)
			return ctx.Err()
		case e := <-l.events:
			l.keep(ctx, e.message(l.instance, number))
		}
	}
}

// flush stores what waits at the end, as far as that is quick.
func (l *AuditLog) flush(ctx context.Context, number uint64) {
	for begin := time.Now(); ; number++ {
		select {
		case e := <-l.events:
			if time.Since(begin) > auditFlush {
				l.dropped.WithLabelValues(auditDropStopped).Inc()
				continue
			}
			l.keep(ctx, e.message(l.instance, number))
		default:
			return
		}
	}
}

// keep stores one event. After ctx ended it is tried for a moment only.
func (l *AuditLog) keep(ctx context.Context, m AuditMessage) {
	for told := false; ; told = true {
		err := l.cfg.Store.publishAudit(context.WithoutCancel(ctx), m)
		refusal, answered := errors.AsType[*jetstream.APIError](err)
		switch {
		case err == nil:
			l.stored.Inc()
			return
		case answered && refusal.Code == 400:
			l.dropped.WithLabelValues(auditDropRefused).Inc()
			l.cfg.Logger.Error("audit event not stored", "id", m.ID, "err", err)
			return
		case ctx.Err() != nil:
			l.dropped.WithLabelValues(auditDropStopped).Inc()
			return
		case !told:
			l.cfg.Logger.Debug("audit event stored later", "id", m.ID, "err", err)
		}
		select {
		case <-time.After(auditAgain):
		case <-ctx.Done():
		}
	}
}

// ensureAudit creates the stream of audit events. Nothing in it can be changed
// or removed, except by the operator of NATS.
func (s *Store) ensureAudit(ctx context.Context) error {
	_, err := s.js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name:        streamAudit,
		Description: "what was asked for, decided and done",
		Subjects:    []string{subjectAudit + ">"},
		Retention:   jetstream.LimitsPolicy,
		MaxAge:      auditKept,
		MaxBytes:    maxAudits,
		MaxMsgSize:  maxAudit + 1<<10, // headers
		Storage:     jetstream.FileStorage,
		Discard:     jetstream.DiscardOld,
		AllowDirect: true,
		AllowRollup: false,
		DenyDelete:  true,
		DenyPurge:   true,
	})
	if err != nil {
		return fmt.Errorf("create stream %s: %w", streamAudit, err)
	}
	return nil
}

func (s *Store) publishAudit(ctx context.Context, m AuditMessage) error {
	if !s.conn.Connected() {
		return ErrNotConnected
	}
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, auditWithin)
	defer cancel()
	msg := nats.NewMsg(subjectAudit + m.Subject)
	msg.Data = data
	_, err = s.js.PublishMsg(ctx, msg, jetstream.WithMsgID(m.ID), jetstream.WithExpectStream(streamAudit), jetstream.WithRetryAttempts(0))
	return err
}

// AuditQuery says which audit events are asked for.
type AuditQuery struct {
	Workload string    // only what is about it; empty: everything
	After    uint64    // a number that ReadAudit returned; 0: from Since on
	Since    time.Time // zero: everything that is kept
	Most     int       // events; 0: as many as fit
}

// AuditPage is an answer to an AuditQuery.
type AuditPage struct {
	Events []AuditMessage
	Next   uint64 // for After of the next query
	More   bool   // there are more already
}

// ReadAudit returns stored audit events, oldest first. With a wait it returns
// the first that come within it if there are none. It is for the controller.
func (c *Conn) ReadAudit(ctx context.Context, q AuditQuery, wait time.Duration) (AuditPage, error) {
	filter := subjectAudit + ">"
	if q.Workload != "" {
		filter = subjectAudit + auditSubject(q.Workload, "")
	}
	news := make(chan *nats.Msg, 1) // more than one is no more news
	if wait > 0 {
		sub, err := c.nc.ChanSubscribe(filter, news)
		if err != nil {
			return AuditPage{}, err
		}
		defer sub.Unsubscribe()
	}
	end := time.NewTimer(wait)
	defer end.Stop()
	var again <-chan time.Time // after news: it may not be stored yet
	for {
		page, err := c.auditPage(ctx, filter, q)
		if err != nil || wait <= 0 || len(page.Events) > 0 {
			return page, err
		}
		if again != nil {
			again = time.After(relistAfter)
		}
	idle:
		for {
			select {
			case <-news:
				again = time.After(coalesceFor)
			case <-again:
				break idle
			case <-end.C:
				return page, nil
			case <-ctx.Done():
				return page, nil
			}
		}
	}
}

func (c *Conn) auditPage(ctx context.Context, filter string, q AuditQuery) (AuditPage, error) {
	req := pageRequest{NextFor: filter, Batch: pageMessages, MaxBytes: pageBytes}
	if q.Most > 0 {
		req.Batch = min(q.Most, pageMessages)
	}
	if q.After > 0 || q.Since.IsZero() {
		req.Seq = q.After + 1
	} else {
		req.StartTime = &q.Since
	}
	msgs, last, more, err := c.page(ctx, streamAudit, req)
	if err != nil {
		return AuditPage{}, fmt.Errorf("read %s: %w", streamAudit, err)
	}
	out := AuditPage{Next: max(q.After, last), More: more}
	for _, m := range msgs {
		e, err := UnmarshalAudit(m.data)
		if err == nil && subjectAudit+e.Subject != m.subject {
			err = fmt.Errorf("%w: it is about %s", ErrInvalidAudit, e.Subject)
		}
		if err != nil {
			c.skip(m.subject, err)
			continue
		}
		out.Events = append(out.Events, e)
	}
	return out, nil
}
