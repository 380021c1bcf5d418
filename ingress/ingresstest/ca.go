package ingresstest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// CA signs the certificates of a test.
type CA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	Pool *x509.CertPool
}

// NewCA makes a CA.
func NewCA(t testing.TB) *CA {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := template("test ca")
	tmpl.IsCA, tmpl.BasicConstraintsValid, tmpl.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	ca := &CA{cert: cert, key: key, Pool: x509.NewCertPool()}
	ca.Pool.AddCert(cert)
	return ca
}

func template(cn string) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		panic(err)
	}
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: cn},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
}

// Pair returns a certificate for the names, and its key, as PEM.
func (ca *CA) Pair(t testing.TB, names ...string) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := template(names[0])
	tmpl.DNSNames = names
	tmpl.KeyUsage = x509.KeyUsageDigitalSignature
	tmpl.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca.cert, &k.PublicKey, ca.key)
	require.NoError(t, err)
	raw, err := x509.MarshalPKCS8PrivateKey(k)
	require.NoError(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})
}

// Certificate returns a certificate for the names.
func (ca *CA) Certificate(t testing.TB, names ...string) tls.Certificate {
	t.Helper()
	cert, key := ca.Pair(t, names...)
	c, err := tls.X509KeyPair(cert, key)
	require.NoError(t, err)
	return c
}

// WriteIdentity writes identity.crt, identity.key and ca.crt to a new folder.
func (ca *CA) WriteIdentity(t testing.TB, dir string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(dir, 0o700))
	cert, key := ca.Pair(t, "ingress-1.ingress.opfield.internal")
	ca.WritePair(t, filepath.Join(dir, "identity"), cert, key)
	root := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw})
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ca.crt"), root, 0o600))
}

// WritePair writes base.crt and base.key.
func (ca *CA) WritePair(t testing.TB, base string, cert, key []byte) {
	t.Helper()
	require.NoError(t, os.WriteFile(base+".crt", cert, 0o600))
	require.NoError(t, os.WriteFile(base+".key", key, 0o600))
}
