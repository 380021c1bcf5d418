package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	caLifetime = 10 * 365 * 24 * time.Hour
	lifetime   = 90 * 24 * time.Hour // of identity and workload certificates
	renewLeft  = 30 * 24 * time.Hour // renewed when this much is left
	clockSkew  = 5 * time.Minute     // certificates begin this much earlier
	renewTick  = 6 * time.Hour       // longest sleep of a renewal loop
	retryFirst = 2 * time.Second     // after a failed renewal, doubled up to
	retryMax   = 10 * time.Minute
)

// CA is the certificate authority of the controller. Everything it knows is
// on disk before an answer leaves it.
type CA struct {
	dir  string            // fixed after OpenCA
	lock *os.File          // held until Close
	key  *ecdsa.PrivateKey // fixed
	cert *x509.Certificate // fixed
	pool *x509.CertPool    // fixed

	mu     sync.Mutex
	ledger ledger // guarded by mu
}

// ledger is what the CA remembers.
type ledger struct {
	Stamp   uint64            `json:"stamp"`   // newest issue stamp
	Members map[string]Member `json:"members"` // by Name.String
	Revoked map[string]uint64 `json:"revoked"` // name → Revocation.Through
	Tokens  map[string]Token  `json:"tokens"`  // by Token.ID
}

// Member is an identity that has joined.
type Member struct {
	Name      Name      `json:"name"`
	Grant     Grant     `json:"workloads,omitempty"`
	Advertise string    `json:"advertise,omitempty"` // relays: host:port that others dial
	Joined    time.Time `json:"joined"`
	NotAfter  time.Time `json:"notAfter"` // of the newest certificate
	Revoked   bool      `json:"revoked"`
}

// OpenCA opens the CA in dir, or creates it. A second process is refused: two
// ledgers over one key would forget each other's revocations.
func OpenCA(dir string) (*CA, error) {
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return nil, fmt.Errorf("open ca: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, secretMode)
	if err != nil {
		return nil, fmt.Errorf("open ca: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("open ca: %s is in use by another process: %w", dir, err)
	}
	ca := &CA{dir: dir, lock: lock, pool: x509.NewCertPool()}
	if err := ca.load(); err != nil {
		lock.Close()
		return nil, fmt.Errorf("open ca: %w", err)
	}
	ca.pool.AddCert(ca.cert)
	return ca, nil
}

func (ca *CA) load() error {
	if _, err := readJSON(ca.LedgerFile(), &ca.ledger); err != nil {
		return err
	}
	l := &ca.ledger
	if l.Members == nil {
		l.Members, l.Revoked, l.Tokens = map[string]Member{}, map[string]uint64{}, map[string]Token{}
	}
	var err error
	ca.cert, err = readCertificate(ca.certFile())
	if errors.Is(err, fs.ErrNotExist) {
		return ca.create()
	}
	if err != nil {
		return err
	}
	if ca.key, err = readKey(filepath.Join(ca.dir, "ca.key")); err != nil {
		return err
	}
	if !ca.key.PublicKey.Equal(ca.cert.PublicKey) {
		return fmt.Errorf("%s: ca.key does not belong to ca.crt", ca.dir)
	}
	return nil
}

// create makes the key first: a crash before the certificate is written is
// repaired by the next start with the same key.
func (ca *CA) create() error {
	key, err := openKey(filepath.Join(ca.dir, "ca.key"))
	if err != nil {
		return err
	}
	stamp, err := ca.stampLocked()
	if err != nil {
		return err
	}
	now := time.Now()
	tmpl := &x509.Certificate{
		SerialNumber:          newSerial(stamp),
		Subject:               pkix.Name{CommonName: "Opfield CA", Organization: []string{"Opfield"}},
		NotBefore:             now.Add(-clockSkew),
		NotAfter:              now.Add(caLifetime),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		return err
	}
	if ca.cert, err = x509.ParseCertificate(der); err != nil {
		return err
	}
	ca.key = key
	return writeFile(ca.certFile(), encodeCertificate(der), publicMode)
}

// Close lets another process open the CA.
func (ca *CA) Close() error { return ca.lock.Close() }

func (ca *CA) certFile() string { return filepath.Join(ca.dir, "ca.crt") }

// CertificatePEM returns the CA certificate.
func (ca *CA) CertificatePEM() []byte { return encodeCertificate(ca.cert.Raw) }

// Fingerprint returns the SHA-256 of the CA certificate in hex.
func (ca *CA) Fingerprint() string { return fingerprint(ca.cert) }

func fingerprint(cert *x509.Certificate) string {
	sum := sha256.Sum256(cert.Raw)
	return hex.EncodeToString(sum[:])
}

// LedgerFile returns the path of what the CA remembers; with ca.key and ca.crt
// it is what a backup needs.
func (ca *CA) LedgerFile() string { return filepath.Join(ca.dir, "ledger.json") }

func (ca *CA) saveLocked() error {
	return writeJSON(ca.LedgerFile(), ca.ledger, secretMode)
}

// stampLocked returns a stamp above every earlier one and stores it.
func (ca *CA) stampLocked() (uint64, error) {
	ca.ledger.Stamp = max(ca.ledger.Stamp+1, uint64(time.Now().UnixNano()))
	return ca.ledger.Stamp, ca.saveLocked()
}

// issueLocked signs an identity certificate and records the member.
func (ca *CA) issueLocked(pub *ecdsa.PublicKey, m Member, hosts []string) ([]byte, error) {
	now := time.Now()
	m.NotAfter = now.Add(lifetime)
	tmpl := &x509.Certificate{
		Subject:     pkix.Name{CommonName: m.Name.ID, OrganizationalUnit: []string{string(m.Name.Role)}},
		URIs:        append(m.Grant.uris(), m.Name.uri()),
		DNSNames:    []string{m.Name.ServerName()},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			tmpl.IPAddresses = append(tmpl.IPAddresses, ip)
		} else {
			tmpl.DNSNames = append(tmpl.DNSNames, h)
		}
	}
	ca.ledger.Members[m.Name.String()] = m
	return ca.signLocked(pub, tmpl)
}

func (ca *CA) signLocked(pub *ecdsa.PublicKey, tmpl *x509.Certificate) ([]byte, error) {
	stamp, err := ca.stampLocked()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	tmpl.SerialNumber = newSerial(stamp)
	tmpl.NotBefore, tmpl.NotAfter = now.Add(-clockSkew), now.Add(lifetime)
	tmpl.BasicConstraintsValid = true
	tmpl.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca.cert, pub, ca.key)
	if err != nil {
		return nil, fmt.Errorf("sign certificate: %w", err)
	}
	return encodeCertificate(der), nil
}

// Sign renews the caller's identity or issues a workload certificate. It
// checks everything itself: chain, expiry, revocation, proof and grant.
func (ca *CA) Sign(_ context.Context, csrPEM []byte, req SignRequest) ([]byte, error) {
	csr, pub, err := parseCSR(csrPEM)
	if err != nil {
		return nil, err
	}
	current, err := parseCertificate(req.Certificate)
	if err != nil {
		return nil, fmt.Errorf("%w: certificate: %w", ErrRefused, err)
	}
	opts := x509.VerifyOptions{Roots: ca.pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	if _, err := current.Verify(opts); err != nil {
		return nil, fmt.Errorf("%w: certificate: %w", ErrRefused, err)
	}
	name, err := CertificateName(current)
	if err != nil {
		return nil, fmt.Errorf("%w: certificate: %w", ErrRefused, err)
	}
	holder, ok := current.PublicKey.(*ecdsa.PublicKey)
	if !ok || !ecdsa.VerifyASN1(holder, proofDigest(req.Workload, csr.Raw), req.Proof) {
		return nil, fmt.Errorf("%w: proof: not made with the key of %s", ErrRefused, name)
	}
	ca.mu.Lock()
	defer ca.mu.Unlock()
	if through, ok := ca.ledger.Revoked[name.String()]; ok && stampOf(current) <= through {
		return nil, fmt.Errorf("%w: %s is revoked; join it again with a new token", ErrRefused, name)
	}
	if req.Workload != "" {
		return ca.signWorkloadLocked(pub, current, name, req.Workload)
	}
	if !holder.Equal(pub) {
		return nil, fmt.Errorf("%w: csr: a renewal keeps the key", ErrRefused)
	}
	m := ca.ledger.Members[name.String()]
	m.Name, m.Grant = name, CertificateGrant(current)
	if m.Joined.IsZero() {
		m.Joined = time.Now() // the ledger was restored from an older copy
	}
	return ca.issueLocked(pub, m, extraHosts(current, name))
}

func extraHosts(cert *x509.Certificate, name Name) []string {
	var out []string
	for _, d := range cert.DNSNames {
		if d != name.ServerName() {
			out = append(out, d)
		}
	}
	for _, ip := range cert.IPAddresses {
		out = append(out, ip.String())
	}
	return out
}

// Revoke withdraws every certificate the name has. It may join again.
func (ca *CA) Revoke(name Name) (Revocation, error) {
	if err := name.Check(); err != nil {
		return Revocation{}, err
	}
	if name.Role == RoleController {
		return Revocation{}, fmt.Errorf("%w: the controller cannot revoke itself", ErrRefused)
	}
	ca.mu.Lock()
	defer ca.mu.Unlock()
	m, ok := ca.ledger.Members[name.String()]
	if !ok {
		return Revocation{}, fmt.Errorf("%w: %s never joined", ErrRefused, name)
	}
	stamp := max(ca.ledger.Stamp+1, uint64(time.Now().UnixNano()))
	m.Revoked = true
	ca.ledger.Stamp, ca.ledger.Members[name.String()], ca.ledger.Revoked[name.String()] = stamp, m, stamp
	return Revocation{Name: name, Through: stamp}, ca.saveLocked()
}

// Revocations returns every revocation, sorted by name.
func (ca *CA) Revocations() []Revocation {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	var out []Revocation
	for s, through := range ca.ledger.Revoked {
		if n, err := ParseName(s); err == nil {
			out = append(out, Revocation{Name: n, Through: through})
		}
	}
	return sortRevocations(out)
}

// Members returns everyone who joined, sorted by name.
func (ca *CA) Members() []Member {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	var out []Member
	for _, k := range slices.Sorted(maps.Keys(ca.ledger.Members)) {
		out = append(out, ca.ledger.Members[k])
	}
	return out
}
