package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	pageMessages = 512
	pageBytes    = 4 << 20
	pageWithin   = 3 * time.Second
)

// stored is the last message of a subject.
type stored struct {
	subject  string
	data     []byte
	deleted  bool // a bucket's marker
	sequence uint64
}

// errPage is the cause of an unexpected answer of the server.
var errPage = errors.New("unexpected answer to a direct get")

// list reads every message of a stream from a sequence on; with one message
// kept per subject that is the present state. It returns the last sequence
// read, or from-1.
func (c *Conn) list(ctx context.Context, stream, filter string, from uint64) ([]stored, uint64, error) {
	var out []stored
	for {
		page, last, more, err := c.page(ctx, stream, pageRequest{Seq: max(from, 1), NextFor: filter, Batch: pageMessages, MaxBytes: pageBytes})
		if err != nil {
			return nil, 0, fmt.Errorf("list %s: %w", stream, err)
		}
		out = append(out, page...)
		from = max(from, last+1)
		if !more {
			return out, from - 1, nil
		}
	}
}

// pageRequest is a direct get of several messages.
type pageRequest struct {
	Seq       uint64     `json:"seq,omitempty"` // the first, or StartTime
	StartTime *time.Time `json:"start_time,omitempty"`
	NextFor   string     `json:"next_by_subj"`
	Batch     int        `json:"batch"`
	MaxBytes  int        `json:"max_bytes"`
}

func (c *Conn) page(ctx context.Context, stream string, what pageRequest) (out []stored, last uint64, more bool, err error) {
	if !c.Connected() {
		return nil, 0, false, ErrNotConnected
	}
	req, err := json.Marshal(what)
	if err != nil {
		return nil, 0, false, err
	}
	ctx, cancel := context.WithTimeout(ctx, pageWithin)
	defer cancel()
	inbox := c.nc.NewInbox()
	sub, err := c.nc.SubscribeSync(inbox)
	if err != nil {
		return nil, 0, false, err
	}
	defer sub.Unsubscribe()
	if err := c.nc.PublishRequest(readSubject(c.identity.Name(), stream), inbox, req); err != nil {
		return nil, 0, false, err
	}
	for {
		m, err := sub.NextMsgWithContext(ctx)
		if err != nil {
			return nil, 0, false, err
		}
		switch status := m.Header.Get("Status"); {
		case status == "204": // end of the page
			return out, last, m.Header.Get("Nats-Num-Pending") != "0" && last > 0, nil // whatever of it was skipped
		case status == "404": // nothing from there on
			return out, last, false, nil
		case status != "" && len(m.Data) == 0:
			return nil, 0, false, fmt.Errorf("%w: %s %s", errPage, status, m.Header.Get("Description"))
		}
		s, seq, err := fromPage(m)
		if seq > last {
			last = seq
		}
		if err != nil {
			c.skip(stream, err)
			continue
		}
		out = append(out, s)
	}
}

// fromPage takes a stored message apart. The server appends its headers to
// those that the publisher chose, so a header that occurs twice is a forgery
// or a copy of another stored message.
func fromPage(m *nats.Msg) (stored, uint64, error) {
	seqs, subjects := m.Header.Values("Nats-Sequence"), m.Header.Values("Nats-Subject")
	if len(seqs) == 0 || len(subjects) == 0 {
		return stored{}, 0, fmt.Errorf("%w: no sequence or subject", errPage)
	}
	seq, err := strconv.ParseUint(seqs[len(seqs)-1], 10, 64)
	if err != nil {
		return stored{}, 0, fmt.Errorf("%w: sequence: %w", errPage, err)
	}
	if len(seqs) > 1 || len(subjects) > 1 {
		return stored{}, seq, fmt.Errorf("%w: forged headers on %s", errPage, subjects[len(subjects)-1])
	}
	return stored{
		sequence: seq,
		subject:  subjects[0],
		data:     m.Data,
		deleted:  m.Header.Get("KV-Operation") != "" || m.Header.Get("Nats-Marker-Reason") != "",
	}, seq, nil
}
