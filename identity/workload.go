package identity

import (
	"crypto/ecdsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"net/url"

	"github.com/opfield/availability/placement"
)

// signWorkloadLocked issues the certificate with which a node answers for a
// workload: for servers only, so it can never pass as an identity.
func (ca *CA) signWorkloadLocked(pub *ecdsa.PublicKey, current *x509.Certificate, node Name, workload string) ([]byte, error) {
	if err := placement.CheckName(workload); err != nil {
		return nil, fmt.Errorf("%w: workload: %w", ErrRefused, err)
	}
	if node.Role != RoleNode {
		return nil, fmt.Errorf("%w: %s is not a node; only nodes serve workloads", ErrRefused, node)
	}
	if !CertificateGrant(current).Allows(workload) {
		return nil, fmt.Errorf("%w: workload %q is not among the names %s may serve; join it with a token whose --workloads allow it", ErrRefused, workload, node)
	}
	return ca.signLocked(pub, &x509.Certificate{
		Subject:     pkix.Name{CommonName: workload, OrganizationalUnit: []string{"workload"}},
		URIs:        []*url.URL{node.uri()},
		DNSNames:    []string{placement.ServerName(workload)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
}
