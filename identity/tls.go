package identity

import (
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/opfield/availability/placement"
)

// ErrNoCertificate is returned for a workload whose certificate is not there.
var ErrNoCertificate = errors.New("no certificate for this workload")

// ClientTLS returns the configuration to dial server: mutual TLS 1.3, the
// server verified by name. Renewal needs no new configuration.
func (i *Identity) ClientTLS(server Name) *tls.Config {
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		RootCAs:              i.pool,
		ServerName:           server.ServerName(),
		GetClientCertificate: i.clientCertificate,
		VerifyConnection: func(cs tls.ConnectionState) error {
			name, err := PeerName(cs)
			if err != nil {
				return err
			}
			if name != server {
				return fmt.Errorf("%w: it is %s, want %s", ErrPeer, name, server)
			}
			return i.notRevoked(cs, name)
		},
	}
}

// ServerTLS returns the configuration of a listener: TLS 1.3, a client
// certificate of one of the roles is required (no roles: of any role).
func (i *Identity) ServerTLS(roles ...Role) *tls.Config {
	return &tls.Config{
		MinVersion:       tls.VersionTLS13,
		ClientAuth:       tls.RequireAndVerifyClientCert,
		ClientCAs:        i.pool,
		GetCertificate:   func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return i.cert.Load(), nil },
		VerifyConnection: func(cs tls.ConnectionState) error { return i.checkClient(cs, roles) },
	}
}

// ServesWorkloads returns the configuration of the accepting end of a link:
// the certificate follows from the server name, the caller's role is checked.
// The caller clones it and sets ALPN.
func (i *Identity) ServesWorkloads(w *WorkloadCertificates, callers ...Role) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequireAndVerifyClientCert,
		ClientCAs:  i.pool,
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			return w.bySNI(hello.ServerName)
		},
		VerifyConnection: func(cs tls.ConnectionState) error {
			// A resumed session never asked for the certificate.
			if _, err := w.bySNI(cs.ServerName); err != nil {
				return err
			}
			return i.checkClient(cs, callers)
		},
	}
}

// WorkloadOfServerName returns the workload a link's server name stands for.
func WorkloadOfServerName(sni string) (string, bool) {
	workload, ok := strings.CutSuffix(sni, placement.ServerName(""))
	return workload, ok && placement.CheckName(workload) == nil
}

func (i *Identity) clientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return i.cert.Load(), nil
}

// ClientCertificate returns the current certificate, for clients whose
// server's certificate is not one of ours.
func (i *Identity) ClientCertificate() func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return i.clientCertificate
}

func (i *Identity) checkClient(cs tls.ConnectionState, roles []Role) error {
	name, err := PeerName(cs)
	if err != nil {
		return err
	}
	if len(roles) > 0 && !slices.Contains(roles, name.Role) {
		return fmt.Errorf("%w: %s; want one of %v", ErrPeer, name, roles)
	}
	return i.notRevoked(cs, name)
}

func (i *Identity) notRevoked(cs tls.ConnectionState, name Name) error {
	if leaf := cs.VerifiedChains[0][0]; i.Revoked(leaf) {
		return fmt.Errorf("%w: %s is revoked", ErrPeer, name)
	}
	return nil
}
