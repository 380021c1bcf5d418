package identity

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/opfield/availability/placement"
)

// ErrInvalidGrant is the cause of every error about a malformed grant.
var ErrInvalidGrant = errors.New("invalid workload grant")

const maxGrantPatterns = 64

// Grant is the list of workload names a node may announce and serve: exact
// names, or prefixes ending in '*'. An empty grant allows nothing.
type Grant []string

// GrantAll allows every workload.
func GrantAll() Grant { return Grant{"*"} }

// ParseGrant reads a comma-separated list of patterns.
func ParseGrant(s string) (Grant, error) {
	var g Grant
	for p := range strings.SplitSeq(s, ",") {
		g = append(g, strings.TrimSpace(p))
	}
	return g, g.Check()
}

// Check reports the first malformed pattern.
func (g Grant) Check() error {
	if len(g) > maxGrantPatterns {
		return fmt.Errorf("%w: %d patterns, at most %d are allowed", ErrInvalidGrant, len(g), maxGrantPatterns)
	}
	for _, p := range g {
		if err := checkPattern(p); err != nil {
			return fmt.Errorf("%w: pattern %q: %w", ErrInvalidGrant, p, err)
		}
	}
	return nil
}

// checkPattern lets a prefix end in '-', which a name may not.
func checkPattern(p string) error {
	prefix, wild := strings.CutSuffix(p, "*")
	if !wild {
		return placement.CheckName(p)
	}
	if prefix == "" {
		return nil
	}
	return placement.CheckName(strings.TrimSuffix(prefix, "-"))
}

// Allows reports whether the grant includes the workload.
func (g Grant) Allows(workload string) bool {
	return placement.CheckName(workload) == nil && slices.ContainsFunc(g, func(p string) bool {
		if prefix, wild := strings.CutSuffix(p, "*"); wild {
			return strings.HasPrefix(workload, prefix)
		}
		return p == workload
	})
}

// Exact returns the names of a grant that has no prefixes, and false otherwise.
func (g Grant) Exact() ([]string, bool) {
	if slices.ContainsFunc(g, func(p string) bool { return strings.HasSuffix(p, "*") }) {
		return nil, false
	}
	return g, true
}

// String returns the comma-separated patterns.
func (g Grant) String() string { return strings.Join(g, ",") }

// CertificateGrant returns the grant written in an identity certificate.
func CertificateGrant(cert *x509.Certificate) Grant {
	var g Grant
	for _, u := range cert.URIs {
		if p := strings.TrimPrefix(u.Path, "/"); u.Scheme == scheme && u.Host == grantHost && checkPattern(p) == nil {
			g = append(g, p)
		}
	}
	return g
}

func (g Grant) uris() []*url.URL {
	var out []*url.URL
	for _, p := range g {
		out = append(out, &url.URL{Scheme: scheme, Host: grantHost, Path: "/" + p})
	}
	return out
}
