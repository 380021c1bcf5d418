package bus

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/opfield/availability/placement"
)

// ErrInvalidAudit is the cause of every error about an audit event.
var ErrInvalidAudit = errors.New("invalid audit event")

// AuditKind says what an audit event is about.
type AuditKind string

// The kinds of audit events.
const (
	AuditAccepted  AuditKind = "accepted"  // a request that changes something
	AuditRefused   AuditKind = "refused"   // a request
	AuditOperation AuditKind = "operation" // one was queued, failed an attempt or ended
	AuditStep      AuditKind = "step"      // of an operation, or of a policy by itself
	AuditRepaired  AuditKind = "repaired"  // what somebody changed by hand
	AuditTakeover  AuditKind = "takeover"  // a controller decides from now on
	AuditEnded     AuditKind = "ended"     // nothing is left of a policy
)

const (
	auditType     = "opfield.audit.v1"
	maxAuditText  = 1024
	maxAuditField = 256
	maxAudit      = 16 << 10
)

// AuditEvent is what is told about one thing that happened (OBS-2). It never
// holds what was sent with a request.
type AuditEvent struct {
	Kind AuditKind `json:"kind"`
	Text string    `json:"text"` // for people
	// What it is about, as far as that is known.
	Workload  string `json:"workload,omitempty"`
	Node      string `json:"node,omitempty"`
	Operation string `json:"operation,omitempty"`
	Code      string `json:"code,omitempty"` // of a refusal or an error
	// Of requests.
	Request string    `json:"request,omitempty"` // id of the call, as in openapi.json
	Method  string    `json:"method,omitempty"`
	Path    string    `json:"path,omitempty"`
	Who     string    `json:"who,omitempty"` // who asked, such as "uid 0"
	At      time.Time `json:"at"`
}

// AuditMessage is an audit event as it is stored: a CloudEvents 1.0 document.
type AuditMessage struct {
	SpecVersion     string     `json:"specversion"`
	ID              string     `json:"id"` // <instance of the controller>.<number>
	Source          string     `json:"source"`
	Type            string     `json:"type"`
	Subject         string     `json:"subject"` // the tail of the NATS subject
	Time            time.Time  `json:"time"`
	DataContentType string     `json:"datacontenttype"`
	Data            AuditEvent `json:"data"`
}

// message puts an event into its envelope. What is not the name of a workload
// or a node is left out, and long texts are cut: some of it comes from users.
func (e AuditEvent) message(instance string, number uint64) AuditMessage {
	for _, name := range []*string{&e.Workload, &e.Node} {
		if placement.CheckName(*name) != nil {
			*name = ""
		}
	}
	e.Text = clipText(e.Text, maxAuditText)
	for _, field := range []*string{&e.Operation, &e.Code, &e.Request, &e.Method, &e.Path, &e.Who} {
		*field = clipText(*field, maxAuditField)
	}
	e.At = e.At.UTC()
	return AuditMessage{
		SpecVersion: "1.0", ID: fmt.Sprintf("%s.%d", instance, number), Source: "/opfield/controller", Type: auditType,
		Subject: auditSubject(e.Workload, e.Node), Time: e.At, DataContentType: "application/json", Data: e,
	}
}

// auditSubject returns the tail of the subject of what is about a workload, or
// a node, or neither.
func auditSubject(workload, node string) string {
	switch {
	case workload != "":
		return "workload." + workload
	case node != "":
		return "node." + node
	}
	return "controller"
}

func clipText(s string, most int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most]
}

// UnmarshalAudit decodes a stored audit event.
func UnmarshalAudit(b []byte) (AuditMessage, error) {
	var m AuditMessage
	if len(b) > maxAudit {
		return AuditMessage{}, fmt.Errorf("%w: %d bytes, at most %d are allowed", ErrInvalidAudit, len(b), maxAudit)
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return AuditMessage{}, fmt.Errorf("%w: %w", ErrInvalidAudit, err)
	}
	if m.SpecVersion != "1.0" || m.Type != auditType {
		return AuditMessage{}, fmt.Errorf("%w: type %q, want %q", ErrInvalidAudit, m.Type, auditType)
	}
	return m, nil
}
