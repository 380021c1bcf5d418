package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
)

// ErrRefused is the cause of every refusal of the CA to sign.
var ErrRefused = errors.New("signing refused")

// SignRequest says which certificate is wanted and proves who asks. The proof
// makes the transport irrelevant: whoever can write to the signer's subject
// still needs the key of the identity.
type SignRequest struct {
	Workload    string `json:"workload,omitempty"` // empty: renew the identity itself
	Certificate []byte `json:"certificate"`        // PEM, the present identity certificate
	Proof       []byte `json:"proof"`              // by its key over workload and CSR
}

// Signer asks the CA for a certificate. It is implemented by CA itself and,
// over NATS, by package bus.
type Signer interface {
	Sign(ctx context.Context, csrPEM []byte, req SignRequest) (certPEM []byte, err error)
}

func proofDigest(workload string, csrDER []byte) []byte {
	h := sha256.New()
	fmt.Fprintf(h, "opfield sign v1\n%d:%s\n%d:", len(workload), workload, len(csrDER))
	h.Write(csrDER)
	return h.Sum(nil)
}

func newCSR(key *ecdsa.PrivateKey, cn string) ([]byte, error) {
	tmpl := &x509.CertificateRequest{Subject: pkix.Name{CommonName: cn}}
	der, err := x509.CreateCertificateRequest(rand.Reader, tmpl, key)
	if err != nil {
		return nil, fmt.Errorf("create certificate request: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), nil
}

// parseCSR verifies that the sender holds the key.
func parseCSR(b []byte) (*x509.CertificateRequest, *ecdsa.PublicKey, error) {
	block, _ := pem.Decode(b)
	if block == nil || block.Type != "CERTIFICATE REQUEST" {
		return nil, nil, fmt.Errorf("%w: csr: want a certificate request in PEM", ErrRefused)
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: csr: %w", ErrRefused, err)
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, nil, fmt.Errorf("%w: csr: %w", ErrRefused, err)
	}
	pub, ok := csr.PublicKey.(*ecdsa.PublicKey)
	if !ok || pub.Curve.Params().BitSize != 256 {
		return nil, nil, fmt.Errorf("%w: csr: want an ECDSA P-256 key", ErrRefused)
	}
	return csr, pub, nil
}
