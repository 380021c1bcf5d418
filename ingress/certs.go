package ingress

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/opfield/availability/upstream"
)

// certStore keeps the pairs that nginx may show, one file each, readable by
// the nginx workers alone: they read it at every handshake, so a renewed pair
// needs no reload. A broken pair never replaces a good one.
type certStore struct {
	dir     string
	uid     int // of the nginx workers; -1 = ours
	content map[string][sha256.Size]byte
	expiry  map[string]time.Time
	errs    map[string]error // by id: why the newest pair was refused
}

func newCertStore(dir string, uid int) *certStore {
	return &certStore{
		dir: dir, uid: uid,
		content: map[string][sha256.Size]byte{}, expiry: map[string]time.Time{}, errs: map[string]error{},
	}
}

// certID names the file of a route's pair.
func certID(t upstream.RouteTLS) string {
	if t.Cert != "" {
		return "named-" + t.Cert
	}
	sum := sha256.Sum256([]byte(t.CertFile + "\n" + t.KeyFile))
	return "file-" + hex.EncodeToString(sum[:8])
}

// has reports whether a usable pair is stored, also from an earlier run.
func (s *certStore) has(id string) bool {
	if _, ok := s.content[id]; ok {
		return true
	}
	text, err := os.ReadFile(s.file(id))
	if err != nil {
		return false
	}
	return s.put(id, text) == nil
}

func (s *certStore) file(id string) string { return filepath.Join(s.dir, id+".pem") }

// put checks a chain with its key and stores it if it is another one.
func (s *certStore) put(id string, text []byte) error {
	err := s.store(id, text)
	if err != nil {
		s.errs[id] = err
	} else {
		delete(s.errs, id)
	}
	return err
}

func (s *certStore) store(id string, text []byte) error {
	sum := sha256.Sum256(text)
	if old, ok := s.content[id]; ok && old == sum {
		return nil
	}
	// The error of X509KeyPair never contains key material.
	pair, err := tls.X509KeyPair(text, text)
	if err != nil {
		return fmt.Errorf("certificate and key do not fit: %w", err)
	}
	leaf, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		return fmt.Errorf("certificate: %w", err)
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return fmt.Errorf("store certificate: %w", err)
	}
	if err := writeFile(s.file(id), text, 0o600, s.uid); err != nil {
		return fmt.Errorf("store certificate: %w", err)
	}
	s.content[id], s.expiry[id] = sum, leaf.NotAfter
	return nil
}

// load reads the pair of files that a route names on this node.
func (s *certStore) load(t upstream.RouteTLS) {
	id := certID(t)
	cert, err := os.ReadFile(t.CertFile)
	if err != nil {
		s.errs[id] = fmt.Errorf("certFile: %w", err)
		return
	}
	key, err := os.ReadFile(t.KeyFile)
	if err != nil {
		s.errs[id] = fmt.Errorf("keyFile: %w", err)
		return
	}
	_ = s.put(id, bytes.Join([][]byte{cert, key}, []byte("\n"))) // kept in errs, shown on the route
}

// prune removes the pairs that no route uses any more.
func (s *certStore) prune(used map[string]bool) {
	for id := range s.content {
		if !used[id] {
			delete(s.content, id)
			delete(s.expiry, id)
			_ = os.Remove(s.file(id)) // a leftover is harmless and is tried again at the next start
		}
	}
}

// pemOf accepts a pair as one PEM text, or as JSON with cert and key.
func pemOf(value []byte) ([]byte, error) {
	value = bytes.TrimSpace(value)
	if !bytes.HasPrefix(value, []byte("{")) {
		return value, nil
	}
	var pair struct {
		Cert string `json:"cert"`
		Key  string `json:"key"`
	}
	if json.Unmarshal(value, &pair) != nil || pair.Cert == "" || pair.Key == "" {
		return nil, errors.New("stored certificate cannot be read")
	}
	return []byte(pair.Cert + "\n" + pair.Key), nil
}

// writeFile replaces a file in one step. uid -1 keeps the owner.
func writeFile(name string, data []byte, mode os.FileMode, uid int) error {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // gone after the rename
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode))
	if uid >= 0 {
		err = errors.Join(err, f.Chown(uid, -1))
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}
