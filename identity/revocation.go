package identity

import (
	"cmp"
	"crypto/rand"
	"crypto/x509"
	"encoding/binary"
	"math/big"
	"slices"
	"sync"
)

// A serial number is 8 bytes of issue stamp (the CA's clock in nanoseconds,
// made strictly increasing) and 8 random bytes. So "every certificate of this
// name until now" needs no list of serials, and a certificate issued after a
// revocation is good although clocks differ: only the CA's own stamps are
// compared.
func newSerial(stamp uint64) *big.Int {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], stamp)
	rand.Read(b[8:])
	return new(big.Int).SetBytes(b[:])
}

func stampOf(cert *x509.Certificate) uint64 {
	var b [16]byte
	if cert.SerialNumber.Sign() < 0 || cert.SerialNumber.BitLen() > 128 {
		return 0 // not ours: older than every revocation
	}
	cert.SerialNumber.FillBytes(b[:])
	return binary.BigEndian.Uint64(b[:8])
}

// Revocation withdraws every certificate of a name that was issued up to a
// stamp.
type Revocation struct {
	Name    Name   `json:"name"`
	Through uint64 `json:"through"` // issue stamp of the CA
}

// Covers reports whether the revocation withdraws the certificate. Workload
// certificates of a revoked node are covered too.
func (r Revocation) Covers(cert *x509.Certificate) bool {
	uri := r.Name.uri().String()
	for _, u := range cert.URIs {
		if u.String() == uri {
			return stampOf(cert) <= r.Through
		}
	}
	return false
}

// revocations is the list that an identity enforces.
type revocations struct {
	mu      sync.RWMutex
	list    []Revocation  // guarded by mu
	changed chan struct{} // guarded by mu; closed and replaced at each change
}

func newRevocations(list []Revocation) *revocations {
	return &revocations{list: sortRevocations(list), changed: make(chan struct{})}
}

func sortRevocations(list []Revocation) []Revocation {
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b Revocation) int {
		return cmp.Or(cmp.Compare(a.Name.String(), b.Name.String()), cmp.Compare(a.Through, b.Through))
	})
	return list
}

// set reports whether the list is another one than before.
func (r *revocations) set(list []Revocation) bool {
	list = sortRevocations(list)
	r.mu.Lock()
	defer r.mu.Unlock()
	if slices.Equal(list, r.list) {
		return false
	}
	r.list = list
	close(r.changed)
	r.changed = make(chan struct{})
	return true
}

func (r *revocations) covers(cert *x509.Certificate) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.ContainsFunc(r.list, func(rev Revocation) bool { return rev.Covers(cert) })
}

func (r *revocations) all() []Revocation {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.Clone(r.list)
}

func (r *revocations) next() <-chan struct{} {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.changed
}
