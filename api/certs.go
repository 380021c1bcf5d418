package api

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/opfield/availability/bus"
)

const (
	maxPEM     = 256 << 10
	clockAhead = time.Hour // a certificate may begin this much later
)

// certName is what a route may refer to; it is a key of the bucket as well.
var certName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,126}[a-z0-9])?$`)

// CertUpload is the body of PUT /v1/certs/{name}: two PEM texts.
type CertUpload struct {
	Certificate string `json:"certificate"` // leaf first, then its chain
	Key         string `json:"key"`
}

// Cert describes a stored certificate without its key.
type Cert struct {
	Name    string    `json:"name"`
	Names   []string  `json:"names"` // host names it is for
	Issuer  string    `json:"issuer"`
	Expires time.Time `json:"expires"`
	Error   string    `json:"error,omitempty"`
}

// CertList is the answer of GET /v1/certs.
type CertList struct {
	Certs []Cert `json:"certs"`
}

// checkCert returns the pair as it is stored: one PEM text with the chain and
// then the key, which tls.X509KeyPair reads with the text as both arguments.
func checkCert(up CertUpload, now time.Time) ([]byte, *x509.Certificate, error) {
	wrong := func(code Code, field, format string, args ...any) ([]byte, *x509.Certificate, error) {
		return nil, nil, Violations{{code, field, fmt.Sprintf(format, args...)}}
	}
	if len(up.Certificate)+len(up.Key) > maxPEM {
		return wrong(CodeCertInvalid, "certificate", "at most %d bytes are allowed with the key", maxPEM)
	}
	chain, err := onlyBlocks([]byte(up.Certificate), "CERTIFICATE")
	if err != nil {
		return wrong(CodeCertInvalid, "certificate", "want a PEM file with the certificate and its chain, and nothing else: %v", err)
	}
	var leaf *x509.Certificate
	for i, block := range chain {
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return wrong(CodeCertInvalid, "certificate", "certificate %d of the file cannot be read: %v", i+1, err)
		}
		if i == 0 {
			leaf = c
		}
	}
	keys, err := onlyBlocks([]byte(up.Key), "PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY", "EC PARAMETERS")
	if err != nil {
		return wrong(CodeCertKey, "key", "want a PEM file with one private key without a passphrase: %v", err)
	}
	keys = slices.DeleteFunc(keys, func(b *pem.Block) bool { return b.Type == "EC PARAMETERS" })
	if len(keys) != 1 || keys[0].Headers["DEK-Info"] != "" {
		return wrong(CodeCertKey, "key", "want exactly one private key without a passphrase")
	}
	pair := append(encodeBlocks(chain), encodeBlocks(keys)...)
	if _, err := tls.X509KeyPair(pair, pair); err != nil {
		if strings.Contains(err.Error(), "does not match") {
			return wrong(CodeCertMismatch, "key", "it does not belong to the certificate; give the key it was made with, and the leaf certificate first")
		}
		return wrong(CodeCertKey, "key", "the private key cannot be read")
	}
	switch {
	case now.After(leaf.NotAfter):
		return wrong(CodeCertExpired, "certificate", "it expired at %s; renew it", leaf.NotAfter.UTC().Format(time.RFC3339))
	case leaf.NotBefore.After(now.Add(clockAhead)):
		return wrong(CodeCertNotYet, "certificate", "it is good from %s on; check the clock", leaf.NotBefore.UTC().Format(time.RFC3339))
	case len(leaf.DNSNames)+len(leaf.IPAddresses) == 0:
		return wrong(CodeCertNames, "certificate", "it names no host (subject alternative name); browsers refuse it")
	}
	return pair, leaf, nil
}

// onlyBlocks reads a PEM text that has blocks of the given types only.
func onlyBlocks(text []byte, types ...string) ([]*pem.Block, error) {
	var out []*pem.Block
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			break
		}
		if !slices.Contains(types, block.Type) {
			return nil, fmt.Errorf("it has a block %q", block.Type)
		}
		out, text = append(out, block), rest
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no block %q found", types[0])
	}
	if bytes.Contains(text, []byte("-----BEGIN")) {
		return nil, fmt.Errorf("the last block is cut off")
	}
	return out, nil
}

func encodeBlocks(blocks []*pem.Block) []byte {
	var out []byte
	for _, b := range blocks {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: b.Type, Bytes: b.Bytes})...)
	}
	return out
}

func describe(name string, leaf *x509.Certificate) Cert {
	names := slices.Clone(leaf.DNSNames)
	for _, ip := range leaf.IPAddresses {
		names = append(names, ip.String())
	}
	return Cert{Name: name, Names: names, Issuer: leaf.Issuer.String(), Expires: leaf.NotAfter}
}

func (s *Server) putCert(ctx context.Context, r *http.Request) (any, error) {
	name := r.PathValue("name")
	if !certName.MatchString(name) || strings.Contains(name, "..") {
		return nil, Violations{{CodeCertName, "name", "want 1 to 128 characters a-z, 0-9, '-' and '.', such as example.com"}}
	}
	var up CertUpload
	if err := decode(r, &up); err != nil {
		return nil, err
	}
	pair, leaf, err := checkCert(up, time.Now())
	if err != nil {
		return nil, err
	}
	s.write.Lock()
	defer s.write.Unlock()
	if err := s.Store.Put(ctx, bus.BucketCerts, name, pair); err != nil {
		return nil, err
	}
	s.Logger.Info("certificate stored", "cert", name, "expires", leaf.NotAfter)
	return describe(name, leaf), nil
}

func (s *Server) listCerts(ctx context.Context, _ *http.Request) (any, error) {
	stored, err := s.certs(ctx)
	return CertList{stored}, err
}

func (s *Server) certs(ctx context.Context) ([]Cert, error) {
	stored, err := s.Conn.ReadBucket(ctx, bus.BucketCerts)
	if err != nil {
		return nil, err
	}
	out := []Cert{}
	for _, name := range slices.Sorted(maps.Keys(stored)) {
		pair, err := tls.X509KeyPair(stored[name], stored[name])
		if err != nil {
			out = append(out, Cert{Name: name, Error: "the stored pair cannot be read; add it again"})
			continue
		}
		out = append(out, describe(name, pair.Leaf))
	}
	return out, nil
}

func (s *Server) deleteCert(ctx context.Context, r *http.Request) (any, error) {
	s.write.Lock()
	defer s.write.Unlock()
	name := r.PathValue("name")
	routes, err := s.Conn.ReadBucket(ctx, bus.BucketRoutes)
	if err != nil {
		return nil, err
	}
	var users []string
	for route, v := range routes {
		if t := fieldsOf(v).TLS; t != nil && t.Cert == name {
			users = append(users, route)
		}
	}
	if slices.Sort(users); len(users) > 0 {
		return nil, refuse(http.StatusConflict, CodeCertInUse, "certificate %q is used by %s; change these routes first", name, strings.Join(users, ", "))
	}
	if err := s.remove(ctx, bus.BucketCerts, name, "certificate"); err != nil {
		return nil, err
	}
	s.Logger.Info("certificate removed", "cert", name)
	return struct{}{}, nil
}
