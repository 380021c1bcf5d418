package api

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

// maxAudits is how many audit events one answer has at most.
const maxAudits = 500

// callerKey is where the context of a connection says who is at its other end.
type callerKey struct{}

// withCaller notes the user at the other end of a unix connection.
func withCaller(ctx context.Context, c net.Conn) context.Context {
	uid, err := peerUID(c)
	if err != nil {
		return ctx
	}
	return context.WithValue(ctx, callerKey{}, fmt.Sprintf("uid %d", uid))
}

func callerOf(ctx context.Context) string {
	who, _ := ctx.Value(callerKey{}).(string)
	return who
}

// pathOf is the path of a request without what may be a secret: somebody may
// name a join token by all of it.
func pathOf(path string) string {
	if _, after, ok := strings.Cut(path, "/v1/tokens/"); ok && after != "" {
		return "/v1/tokens/{id}"
	}
	return path
}

// pathOf is the path of a call about a workload or a node.
func (c call) pathOf(workload, node string) string {
	return strings.NewReplacer("{workload}", workload, "{node}", node).Replace(c.path)
}

// about says what a request changed, where its path does not.
func about(answer any) string {
	switch v := answer.(type) {
	case Applied:
		return fmt.Sprintf("(%d added, %d changed)", len(v.Added), len(v.Changed))
	case NewToken:
		return fmt.Sprintf("(%s, role %s)", v.For.ID, v.For.Role)
	case identity.Revocation:
		return "(" + v.Name.String() + ")"
	}
	return ""
}

// accepted tells of a request that changed something (OBS-2).
func (s *Server) accepted(ctx context.Context, e bus.AuditEvent) {
	e.Kind, e.Who, e.At = bus.AuditAccepted, callerOf(ctx), time.Now()
	s.Logger.Info("request accepted", "request", e.Request, "workload", e.Workload, "operation", e.Operation, "node", e.Node, "method", e.Method, "path", e.Path, "who", e.Who)
	if s.Audit != nil {
		s.Audit(e)
	}
}

// refused tells of a request that was not accepted (OBS-2). A question that
// cannot be answered now was not refused: whoever asks it asks again and again.
func (s *Server) refused(ctx context.Context, method, path string, p *Problem) {
	e := bus.AuditEvent{
		Kind: bus.AuditRefused, Code: string(p.Code), Method: method, Path: pathOf(path), Workload: p.workload, Who: callerOf(ctx), At: time.Now(),
	}
	if rest, ok := strings.CutPrefix(path, "/v1/availability/"); ok && e.Workload == "" {
		if name, _, _ := strings.Cut(rest, "/"); placement.CheckName(name) == nil && rest != "check" {
			e.Workload = name
		}
	}
	if rest, ok := strings.CutPrefix(path, "/v1/nodes/"); ok {
		e.Node, _, _ = strings.Cut(rest, "/")
	}
	e.Text = fmt.Sprintf("%s %s: %s", method, e.Path, p.Code)
	s.Logger.Info("request refused", "method", method, "path", e.Path, "code", e.Code, "workload", e.Workload, "who", e.Who)
	if s.Audit != nil && (method != http.MethodGet || p.Status != http.StatusServiceUnavailable) {
		s.Audit(e)
	}
}

// AuditList is the answer of GET /v1/audit.
type AuditList struct {
	Events []bus.AuditMessage `json:"events"` // CloudEvents documents, oldest first
	Next   uint64             `json:"next"`   // for after, to go on
	More   bool               `json:"more"`   // there are more already
}

type getAudit struct {
	Workload string    `query:"workload" doc:"Only what is about this workload."`
	Since    time.Time `query:"since" doc:"Only what was stored at this time or later; absent: everything that is kept."`
	After    uint64    `query:"after" doc:"Go on after an answer: its next. since does not count then."`
	Wait     int       `query:"wait" doc:"Seconds to wait for an event if there is none; at most 15 count." minimum:"0"`
}

// auditRoutes registers what reads the audit log.
func (s *Server) auditRoutes(a huma.API) {
	c := call{http.MethodGet, "/v1/audit", "list-audit", "What was asked for, decided and done, oldest first", ""}
	huma.Register(a, c.operation(a), bounded(s, func(ctx context.Context, in *getAudit) (*found[AuditList], error) {
		if in.Workload != "" && placement.CheckName(in.Workload) != nil {
			p := refuse(http.StatusUnprocessableEntity, CodeMalformed, "workload: want the name of a workload")
			p.Errors = Violations{{CodeMalformed, "workload", "want the name of a workload"}}
			return nil, p
		}
		page, err := s.Conn.ReadAudit(ctx, bus.AuditQuery{Workload: in.Workload, After: in.After, Since: in.Since, Most: maxAudits}, min(time.Duration(in.Wait)*time.Second, maxWait))
		if err != nil {
			return nil, err
		}
		return &found[AuditList]{AuditList{append([]bus.AuditMessage{}, page.Events...), page.Next, page.More}}, nil
	}))
}
