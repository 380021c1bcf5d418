package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"strings"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/policy"
	"github.com/opfield/availability/policy/engine"
)

// Code is a stable, machine-readable name of a refusal.
type Code string

// The codes of this package. Route codes come from the route checker, those of
// availability from packages policy and placement.
const (
	CodeMalformed      Code = "REQUEST_MALFORMED"
	CodeTooLarge       Code = "REQUEST_TOO_LARGE"
	CodeNotFound       Code = "NOT_FOUND"
	CodeStoreAway      Code = "STORE_UNAVAILABLE"
	CodeEngineAway     Code = "AVAILABILITY_ENGINE_UNAVAILABLE"
	CodeNotReady       Code = "AVAILABILITY_CONTROLLER_NOT_READY"
	CodeInternal       Code = "INTERNAL"
	CodeRouteInvalid   Code = "ROUTE_INVALID"
	CodeRouteName      Code = "ROUTE_NAME_MISMATCH"
	CodeRouteTwice     Code = "ROUTE_NAME_DUPLICATE"
	CodeRouteCert      Code = "ROUTE_CERT_UNKNOWN"
	CodeCertName       Code = "CERT_NAME_INVALID"
	CodeCertInvalid    Code = "CERT_INVALID"
	CodeCertKey        Code = "CERT_KEY_INVALID"
	CodeCertMismatch   Code = "CERT_KEY_MISMATCH"
	CodeCertExpired    Code = "CERT_EXPIRED"
	CodeCertNotYet     Code = "CERT_NOT_YET_VALID"
	CodeCertNames      Code = "CERT_NAMES_MISSING"
	CodeCertInUse      Code = "CERT_IN_USE"
	CodeTokenInvalid   Code = "TOKEN_REQUEST_INVALID"
	CodeTokenUnknown   Code = "TOKEN_UNKNOWN"
	CodeIdentityDenied Code = "IDENTITY_NOT_REVOKED"
)

// Violation is one thing that is wrong with a request.
type Violation struct {
	Code    Code   `json:"code"`
	Field   string `json:"field"`
	Message string `json:"message"`
}

// Violations is the error of a request with wrong fields.
type Violations []Violation

// Error names every field.
func (v Violations) Error() string {
	var out []string
	for _, p := range v {
		out = append(out, p.Field+": "+p.Message)
	}
	return strings.Join(out, "; ")
}

// Problem is an RFC 9457 problem document and the error it stands for.
type Problem struct {
	Type   string     `json:"type"`
	Title  string     `json:"title"`
	Status int        `json:"status"`
	Code   Code       `json:"code"`
	Detail string     `json:"detail"`
	Errors Violations `json:"errors,omitempty"`
	// Eligibility explains AVAILABILITY_PREFLIGHT_BLOCKED.
	Eligibility *policy.Eligibility `json:"eligibility,omitempty"`

	workload string // that was asked for, for the log
}

// Error returns the detail with its code.
func (p *Problem) Error() string { return fmt.Sprintf("%s (%s)", p.Detail, p.Code) }

// GetStatus returns the HTTP status.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType returns the media type of RFC 9457 for JSON.
func (p *Problem) ContentType(string) string { return problemType }

const problemType = "application/problem+json"

func refuse(status int, code Code, format string, args ...any) *Problem {
	return &Problem{Type: "about:blank", Title: http.StatusText(status), Status: status, Code: code, Detail: fmt.Sprintf(format, args...)}
}

// problemOf turns any error into a document. Unknown errors keep their text
// in the log only.
func problemOf(err error, log *slog.Logger) *Problem {
	if p, ok := errors.AsType[*Problem](err); ok {
		return p
	}
	if r, ok := errors.AsType[*policy.Refusal](err); ok {
		return refusal(r)
	}
	if v, ok := errors.AsType[Violations](err); ok && len(v) > 0 {
		p := refuse(http.StatusUnprocessableEntity, v[0].Code, "%s", v.Error())
		p.Errors = v
		return p
	}
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return refuse(http.StatusRequestEntityTooLarge, CodeTooLarge, "the request is too large; send it in parts")
	}
	switch {
	case errors.Is(err, engine.ErrNotReady):
		return refuse(http.StatusServiceUnavailable, CodeNotReady, "this controller does not decide about policies now, so nothing was done and nothing can be said about them: it has just started, NATS is away, or another controller leads; try again in a moment, or on the other controller's host")
	case errors.Is(err, identity.ErrInvalidName), errors.Is(err, identity.ErrInvalidGrant), errors.Is(err, identity.ErrToken):
		return refuse(http.StatusUnprocessableEntity, CodeTokenInvalid, "%s", without(err, identity.ErrToken))
	case errors.Is(err, bus.ErrNotConnected):
		return refuse(http.StatusServiceUnavailable, CodeStoreAway, "NATS cannot be reached; try again when `opfield status` shows it connected")
	}
	log.Error("request not completed", "err", err)
	if _, ok := errors.AsType[*fs.PathError](err); ok { // the CA's files
		return refuse(http.StatusInternalServerError, CodeInternal, "the controller could not read or write a file of its own; see its log, mend that, and try again")
	}
	return refuse(http.StatusServiceUnavailable, CodeStoreAway, "the store did not answer; try again, and see the controller's log")
}

// refusal is what the policy engine did not accept.
func refusal(r *policy.Refusal) *Problem {
	status := http.StatusUnprocessableEntity
	switch {
	case r.NotFound:
		status = http.StatusNotFound
	case r.Conflict && len(r.Violations) == 0, r.Code == policy.CodePreflight:
		status = http.StatusConflict
	}
	p := refuse(status, Code(r.Code), "%s", r.Message)
	p.Eligibility = r.Eligibility
	for _, v := range r.Violations {
		p.Errors = append(p.Errors, Violation{Code(v.Code), v.Field, v.Message})
	}
	if p.Detail == "" {
		p.Detail = p.Errors.Error()
	}
	return p
}

func writeProblem(w http.ResponseWriter, p *Problem) {
	w.Header().Set("Content-Type", problemType)
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p) // the client is gone
}
