package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"
)

// ErrNotJoined is returned by Open for a directory without an identity.
var ErrNotJoined = errors.New("no identity here")

// RelayAddress says where a relay listens.
type RelayAddress struct {
	ID   string `json:"id"`
	Addr string `json:"addr"` // host:port
}

// Bootstrap is what an identity learned when it joined: where to begin.
type Bootstrap struct {
	NATS       []string       `json:"nats"`             // URLs
	NATSCA     string         `json:"natsCA,omitempty"` // PEM; empty: the server shows a certificate of our CA
	Relays     []RelayAddress `json:"relays"`           // as known at join; the bucket has the present ones
	Controller string         `json:"controller"`       // host:port of the join endpoint
}

// record is the content of join.json.
type record struct {
	Name Name `json:"name"`
	Bootstrap
}

// Identity is a joined identity: its key, its certificate and what it trusts.
// Everything is read once; renewal replaces the certificate while running.
type Identity struct {
	dir     string // fixed after Open
	record  record // fixed
	key     *ecdsa.PrivateKey
	ca      *x509.Certificate
	pool    *x509.CertPool
	revoked *revocations

	cert atomic.Pointer[tls.Certificate] // replaced by renewal
}

// Open reads the identity in dir.
func Open(dir string) (*Identity, error) {
	i := &Identity{dir: dir, pool: x509.NewCertPool()}
	found, err := readJSON(i.path("join.json"), &i.record)
	if err != nil {
		return nil, fmt.Errorf("open identity: %w", err)
	}
	if !found {
		return nil, fmt.Errorf("%w: %s; run the join command with a token first", ErrNotJoined, dir)
	}
	if i.ca, err = readCertificate(i.CAFile()); err != nil {
		return nil, fmt.Errorf("open identity: %w", err)
	}
	i.pool.AddCert(i.ca)
	if i.key, err = readKey(i.KeyFile()); err != nil {
		return nil, fmt.Errorf("open identity: %w", err)
	}
	cert, err := readCertificate(i.CertFile())
	if err != nil {
		return nil, fmt.Errorf("open identity: %w", err)
	}
	if err := i.adopt(cert); err != nil {
		return nil, fmt.Errorf("open identity: %s: %w", i.CertFile(), err)
	}
	var revs []Revocation
	if _, err := readJSON(i.path("revoked.json"), &revs); err != nil {
		return nil, fmt.Errorf("open identity: %w", err)
	}
	i.revoked = newRevocations(revs)
	return i, nil
}

// adopt makes cert the current one if it belongs to this identity. An expired
// one is adopted too: the process starts, says so, and peers refuse it.
func (i *Identity) adopt(cert *x509.Certificate) error {
	if !i.key.PublicKey.Equal(cert.PublicKey) {
		return errors.New("the certificate does not belong to the key")
	}
	if err := cert.CheckSignatureFrom(i.ca); err != nil {
		return fmt.Errorf("not signed by %s: %w", i.CAFile(), err)
	}
	name, err := CertificateName(cert)
	if err != nil {
		return err
	}
	if name != i.record.Name {
		return fmt.Errorf("it is for %s, want %s", name, i.record.Name)
	}
	i.cert.Store(&tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: i.key, Leaf: cert})
	return nil
}

// create writes a new identity directory; join.json comes last and makes it
// valid. The key is at KeyFile already.
func create(dir string, rec record, certPEM, caPEM []byte) (*Identity, error) {
	i := &Identity{dir: dir}
	err := errors.Join(
		writeFile(i.CAFile(), caPEM, publicMode),
		writeFile(i.CertFile(), certPEM, publicMode),
	)
	if err != nil {
		return nil, err
	}
	// A former identity here may have been revoked; its caches end with it.
	for _, stale := range []string{"revoked.json", "workloads"} {
		if err := os.RemoveAll(i.path(stale)); err != nil {
			return nil, err
		}
	}
	if err := writeJSON(i.path("join.json"), rec, publicMode); err != nil {
		return nil, err
	}
	return Open(dir)
}

// Local returns the identity of a process that lives with its CA, in dir. It
// is issued if there is none, if hosts changed, or if it is due for renewal.
// hosts are further names and addresses of its certificate.
func (ca *CA) Local(dir string, name Name, boot Bootstrap, hosts []string) (*Identity, error) {
	return ca.local(dir, Member{Name: name}, boot, hosts)
}

// LocalNode is Local for a node with a grant.
func (ca *CA) LocalNode(dir, id string, boot Bootstrap, grant Grant) (*Identity, error) {
	return ca.local(dir, Member{Name: Name{Role: RoleNode, ID: id}, Grant: grant}, boot, nil)
}

func (ca *CA) local(dir string, m Member, boot Bootstrap, hosts []string) (*Identity, error) {
	if err := errors.Join(m.Name.Check(), m.Grant.Check()); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return nil, err
	}
	key, err := openKey(filepath.Join(dir, "identity.key"))
	if err != nil {
		return nil, err
	}
	ca.mu.Lock()
	m.Joined = time.Now()
	certPEM, err := ca.issueLocked(&key.PublicKey, m, hosts)
	ca.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return create(dir, record{Name: m.Name, Bootstrap: boot}, certPEM, ca.CertificatePEM())
}

func (i *Identity) path(name string) string { return filepath.Join(i.dir, name) }

// Name returns the role and the id.
func (i *Identity) Name() Name { return i.record.Name }

// Dir returns the directory of the identity.
func (i *Identity) Dir() string { return i.dir }

// CertFile, KeyFile and CAFile return the paths of the PEM files.
func (i *Identity) CertFile() string { return i.path("identity.crt") }

// KeyFile returns the path of the private key.
func (i *Identity) KeyFile() string { return i.path("identity.key") }

// CAFile returns the path of the CA certificate.
func (i *Identity) CAFile() string { return i.path("ca.crt") }

// Bootstrap returns what was learned at joining.
func (i *Identity) Bootstrap() Bootstrap { return i.record.Bootstrap }

// Grant returns the workload names the current certificate allows.
func (i *Identity) Grant() Grant { return CertificateGrant(i.cert.Load().Leaf) }

// Expires returns when the current certificate ends.
func (i *Identity) Expires() time.Time { return i.cert.Load().Leaf.NotAfter }

// Revoked reports whether a peer's certificate is withdrawn.
func (i *Identity) Revoked(cert *x509.Certificate) bool { return i.revoked.covers(cert) }

// SetRevoked replaces the list of revocations and keeps it on disk, so that
// it holds after a restart without NATS.
func (i *Identity) SetRevoked(list []Revocation) error {
	if !i.revoked.set(list) {
		return nil
	}
	return writeJSON(i.path("revoked.json"), sortRevocations(list), publicMode)
}

// Revocations returns the present list.
func (i *Identity) Revocations() []Revocation { return i.revoked.all() }

// RevocationsChanged returns a channel that is closed at the next change of
// the list. Owners of sessions take the channel first, then end the sessions
// whose certificate is Revoked, then wait.
func (i *Identity) RevocationsChanged() <-chan struct{} { return i.revoked.next() }

// install makes a renewed certificate current, on disk first.
func (i *Identity) install(certPEM []byte) error {
	cert, err := parseCertificate(certPEM)
	if err != nil {
		return err
	}
	if now := time.Now(); now.After(cert.NotAfter) || now.Before(cert.NotBefore) {
		return errors.New("the CA's answer is not valid now; check the clocks")
	}
	if !i.key.PublicKey.Equal(cert.PublicKey) {
		return errors.New("the CA's answer is for another key")
	}
	if err := writeFile(i.CertFile(), bytes.TrimLeft(certPEM, "\n"), publicMode); err != nil {
		return err
	}
	return i.adopt(cert)
}
