package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/opfield/availability/placement"
)

var (
	// ErrInvalidName is the cause of every error about a malformed name.
	ErrInvalidName = errors.New("invalid identity name")
	// ErrPeer is the cause of every refusal of a peer's certificate.
	ErrPeer = errors.New("peer refused")
)

// Role says what sort of process an identity is.
type Role string

// The roles. A subscriber follows health events and may do nothing else.
const (
	RoleController Role = "controller"
	RoleNode       Role = "node"
	RoleRelay      Role = "relay"
	RoleIngress    Role = "ingress"
	RoleSubscriber Role = "subscriber"
)

// JoinableRoles are the roles that a join token can give.
func JoinableRoles() []Role { return []Role{RoleNode, RoleRelay, RoleIngress, RoleSubscriber} }

const (
	scheme    = "opfield"
	domain    = "opfield.internal"
	grantHost = "grant"
	mainID    = "main"
	storeID   = "store"
)

// Name is the role and the id of an identity.
type Name struct {
	Role Role   `json:"role"`
	ID   string `json:"id"`
}

// ControllerName is the name of the controller. Its certificate is also that
// of the embedded NATS server.
func ControllerName() Name { return Name{Role: RoleController, ID: mainID} }

// StoreName is the name with which the controller, and nobody else, writes to
// the buckets.
func StoreName() Name { return Name{Role: RoleController, ID: storeID} }

// String returns "<role>/<id>".
func (n Name) String() string { return string(n.Role) + "/" + n.ID }

// ServerName returns the DNS name in the identity's certificate. It exists in
// certificates only and is never resolved.
func (n Name) ServerName() string { return n.ID + "." + string(n.Role) + "." + domain }

// Check reports an unknown role or an invalid id.
func (n Name) Check() error {
	switch n.Role {
	case RoleController, RoleNode, RoleRelay, RoleIngress, RoleSubscriber:
	default:
		return fmt.Errorf("%w: role %q; use controller, node, relay, ingress or subscriber", ErrInvalidName, n.Role)
	}
	if err := placement.CheckName(n.ID); err != nil {
		return fmt.Errorf("%w: id: %w", ErrInvalidName, err)
	}
	return nil
}

func (n Name) uri() *url.URL { return &url.URL{Scheme: scheme, Host: string(n.Role), Path: "/" + n.ID} }

// ParseName is the reverse of Name.String.
func ParseName(s string) (Name, error) {
	role, id, ok := strings.Cut(s, "/")
	if !ok {
		return Name{}, fmt.Errorf("%w: %q; want <role>/<id>", ErrInvalidName, s)
	}
	n := Name{Role: Role(role), ID: id}
	return n, n.Check()
}

// PeerName returns the name of the verified peer of a connection.
func PeerName(cs tls.ConnectionState) (Name, error) {
	if len(cs.VerifiedChains) == 0 || len(cs.VerifiedChains[0]) == 0 {
		return Name{}, fmt.Errorf("%w: it showed no verified certificate", ErrPeer)
	}
	return CertificateName(cs.VerifiedChains[0][0])
}

// CertificateName returns the name that an identity certificate is for. A
// workload certificate is not an identity and gives an error. The caller has
// verified the certificate.
func CertificateName(cert *x509.Certificate) (Name, error) {
	var found []Name
	for _, u := range cert.URIs {
		if u.Scheme != scheme || u.Host == grantHost {
			continue
		}
		n, err := ParseName(u.Host + u.Path)
		if err != nil {
			return Name{}, fmt.Errorf("%w: %w", ErrPeer, err)
		}
		found = append(found, n)
	}
	if len(found) != 1 {
		return Name{}, fmt.Errorf("%w: its certificate names %d identities, want 1", ErrPeer, len(found))
	}
	if !slices.Contains(cert.DNSNames, found[0].ServerName()) {
		return Name{}, fmt.Errorf("%w: its certificate is not that of %s itself", ErrPeer, found[0])
	}
	return found[0], nil
}
