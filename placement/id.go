package placement

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// ErrInvalidName is the cause of every error about a malformed name.
var ErrInvalidName = errors.New("invalid name")

// ErrInvalidLink is the cause of every error about a malformed link id.
var ErrInvalidLink = errors.New("invalid link id")

// MaxNameLength is the longest workload, node or role id: one DNS label
// (RFC 1035 section 2.3.4), because names become parts of host names.
const MaxNameLength = 63

// domain is the name space of the server names that secure links use. It
// exists in certificates only and is never resolved.
const domain = "opfield.internal"

// CheckName reports why name cannot be the name of a workload, a node, a
// relay or an ingress node: 1–63 characters a–z, 0–9 and '-', beginning and
// ending with a letter or digit. Such a name is safe as a DNS label, a NATS
// subject token, a file name and an nginx identifier part.
func CheckName(name string) error {
	if name == "" {
		return fmt.Errorf("%w: it is empty; use 1 to %d characters a-z, 0-9 and '-'", ErrInvalidName, MaxNameLength)
	}
	if len(name) > MaxNameLength {
		return fmt.Errorf("%w: %d characters long, at most %d are allowed", ErrInvalidName, len(name), MaxNameLength)
	}
	for i := 0; i < len(name); i++ {
		c := name[i]
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
		case c == '-' && i > 0 && i < len(name)-1:
		default:
			return fmt.Errorf("%w: %q; use a-z, 0-9 and '-', beginning and ending with a letter or digit", ErrInvalidName, name)
		}
	}
	return nil
}

// ID names one placement: the copy of a workload on a node. At most one
// placement of a workload exists per node, so the pair is unique.
type ID struct {
	Workload string
	Node     string
}

// String returns "<workload>.<node>"; it is also the tail of the NATS subject.
func (id ID) String() string { return id.Workload + "." + id.Node }

// Check reports an invalid workload or node name.
func (id ID) Check() error {
	if err := CheckName(id.Workload); err != nil {
		return fmt.Errorf("workload: %w", err)
	}
	if err := CheckName(id.Node); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	return nil
}

// servicePrefix begins the id of a service link. A workload link always has a
// '.' there.
const servicePrefix = "service/"

// LinkID names a secure link: either to one port of one placement, or to a
// service of the product itself, which has no placement.
type LinkID struct {
	Placement ID
	Port      uint16 // TCP port of the application, 1–65535
	Service   string // name of the service; then the others are zero
}

// ServiceRegistry is the service of the internal image registry.
const ServiceRegistry = "registry"

// ServiceLink returns the link to a service of the product.
func ServiceLink(name string) LinkID { return LinkID{Service: name} }

// String returns "<workload>.<node>/<port>" or "service/<name>".
func (l LinkID) String() string {
	if l.Service != "" {
		return servicePrefix + l.Service
	}
	return l.Placement.String() + "/" + strconv.Itoa(int(l.Port))
}

// ServerName returns the TLS server name of a workload's link: that of its
// workload, so that every placement of a workload answers to the same name.
// The end of a service link answers to the name of its own identity.
func (l LinkID) ServerName() string { return ServerName(l.Placement.Workload) }

// ServerName returns the TLS server name under which a workload is reached.
func ServerName(workload string) string { return workload + ".workload." + domain }

// ParseLinkID is the reverse of LinkID.String.
func ParseLinkID(s string) (LinkID, error) {
	if service, ok := strings.CutPrefix(s, servicePrefix); ok {
		if err := CheckName(service); err != nil {
			return LinkID{}, fmt.Errorf("%w: service: %w", ErrInvalidLink, err)
		}
		return ServiceLink(service), nil
	}
	name, port, ok := strings.Cut(s, "/")
	workload, node, ok2 := strings.Cut(name, ".")
	if !ok || !ok2 {
		return LinkID{}, fmt.Errorf("%w: want <workload>.<node>/<port> or service/<name>", ErrInvalidLink)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || strconv.FormatUint(n, 10) != port {
		return LinkID{}, fmt.Errorf("%w: the port must be 1 to 65535", ErrInvalidLink)
	}
	id := LinkID{Placement: ID{Workload: workload, Node: node}, Port: uint16(n)}
	if err := id.Placement.Check(); err != nil {
		return LinkID{}, fmt.Errorf("%w: %w", ErrInvalidLink, err)
	}
	return id, nil
}
