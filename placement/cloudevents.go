package placement

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrVersion is returned for an event of a major version that this code does
// not know. Such an event must be skipped, not guessed at.
var ErrVersion = errors.New("unknown event version")

const (
	// EventType is the CloudEvents type of a placement health event.
	EventType = "opfield.placement.health.v1"
	// SubjectPrefix begins the NATS subject of every placement health event.
	SubjectPrefix = "opfield.placement.v1."
	// MaxEventSize bounds an encoded event in bytes.
	MaxEventSize = 16 << 10

	specVersion     = "1.0"
	eventTypeFamily = "opfield.placement.health."
)

// Subject returns the NATS subject of the events of a placement.
func (id ID) Subject() string { return SubjectPrefix + id.String() }

// envelope is the JSON event format of CloudEvents 1.0 (section 3 of the
// CloudEvents JSON format specification).
type envelope struct {
	SpecVersion     string          `json:"specversion"`
	ID              string          `json:"id"`
	Source          string          `json:"source"`
	Type            string          `json:"type"`
	Subject         string          `json:"subject"`
	Time            *time.Time      `json:"time,omitempty"`
	DataContentType string          `json:"datacontenttype"`
	Data            json.RawMessage `json:"data"`
}

// Marshal encodes the event as a CloudEvents 1.0 JSON document.
func (e Event) Marshal() ([]byte, error) {
	if err := e.Check(); err != nil {
		return nil, err
	}
	if e.Ports == nil {
		e.Ports = []Port{}
	}
	data, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("encode event data: %w", err)
	}
	env := envelope{
		SpecVersion:     specVersion,
		ID:              fmt.Sprintf("%s.%d.%d", e.Placement, e.Sequence.Incarnation, e.Sequence.Counter),
		Source:          "/opfield/node/" + e.Node,
		Type:            EventType,
		Subject:         e.Placement,
		DataContentType: "application/json",
		Data:            data,
	}
	if !e.ObservedAt.IsZero() {
		t := e.ObservedAt.UTC()
		env.Time = &t
	}
	return json.Marshal(env)
}

// UnmarshalEvent decodes a CloudEvents 1.0 JSON document. Unknown fields are
// ignored; an unknown major version gives ErrVersion.
func UnmarshalEvent(b []byte) (Event, error) {
	if len(b) > MaxEventSize {
		return Event{}, fmt.Errorf("%w: %d bytes, at most %d are allowed", ErrInvalidEvent, len(b), MaxEventSize)
	}
	var env envelope
	if err := json.Unmarshal(b, &env); err != nil {
		return Event{}, fmt.Errorf("%w: %w", ErrInvalidEvent, err)
	}
	if env.SpecVersion != specVersion {
		return Event{}, fmt.Errorf("%w: specversion %q, want %q", ErrVersion, env.SpecVersion, specVersion)
	}
	if env.Type != EventType {
		if strings.HasPrefix(env.Type, eventTypeFamily) {
			return Event{}, fmt.Errorf("%w: type %q, want %q", ErrVersion, env.Type, EventType)
		}
		return Event{}, fmt.Errorf("%w: type: %q, want %q", ErrInvalidEvent, env.Type, EventType)
	}
	var e Event
	if err := json.Unmarshal(env.Data, &e); err != nil {
		return Event{}, fmt.Errorf("%w: data: %w", ErrInvalidEvent, err)
	}
	if err := e.Check(); err != nil {
		return Event{}, err
	}
	return e, nil
}
