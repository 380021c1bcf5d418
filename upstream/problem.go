package upstream

import "strings"

// Code is a stable, machine-readable name of what is wrong with a route.
type Code string

// The codes of route problems.
const (
	CodeName         Code = "ROUTE_NAME_INVALID"
	CodeHost         Code = "ROUTE_HOST_INVALID"
	CodePath         Code = "ROUTE_PATH_INVALID"
	CodeProtocol     Code = "ROUTE_PROTOCOL_INVALID"
	CodeWorkload     Code = "ROUTE_WORKLOAD_INVALID"
	CodePort         Code = "ROUTE_PORT_INVALID"
	CodeListen       Code = "ROUTE_LISTEN_INVALID"
	CodeTLS          Code = "ROUTE_TLS_INVALID"
	CodeSettings     Code = "ROUTE_SETTINGS_INVALID"
	CodeHostConflict Code = "ROUTE_HOST_CONFLICT"
	CodePortConflict Code = "ROUTE_LISTEN_CONFLICT"
)

// Problem is one thing that is wrong with a route. Message names what is
// expected and what to do next; it never repeats an unprintable value.
type Problem struct {
	Code    Code   `json:"code"`
	Field   string `json:"field"`
	Message string `json:"message"`
}

// Error returns field and message.
func (p Problem) Error() string { return p.Field + ": " + p.Message }

// Problems are all problems of one route, in the order of its fields.
type Problems []Problem

// Error returns every problem, separated by "; ".
func (p Problems) Error() string {
	texts := make([]string, len(p))
	for i, one := range p {
		texts[i] = one.Error()
	}
	return strings.Join(texts, "; ")
}

// Has reports whether one of the problems has the code.
func (p Problems) Has(code Code) bool {
	for _, one := range p {
		if one.Code == code {
			return true
		}
	}
	return false
}
