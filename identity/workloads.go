package identity

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opfield/availability/placement"
)

// WorkloadCertificates are the certificates with which a node answers for its
// workloads, kept in memory and in DIR/workloads.
type WorkloadCertificates struct {
	identity *Identity // fixed after Workloads
	signer   Signer    // fixed
	dir      string    // fixed

	mu    sync.RWMutex
	certs map[string]*tls.Certificate // guarded by mu
	busy  map[string]chan struct{}    // guarded by mu; a request to the CA is running
}

// Workloads opens the cached workload certificates. One that cannot be read
// is left out and asked for again by Ensure.
func (i *Identity) Workloads(signer Signer) (*WorkloadCertificates, error) {
	w := &WorkloadCertificates{
		identity: i,
		signer:   signer,
		dir:      i.path("workloads"),
		certs:    map[string]*tls.Certificate{},
		busy:     map[string]chan struct{}{},
	}
	if err := os.MkdirAll(w.dir, dirMode); err != nil {
		return nil, fmt.Errorf("open workload certificates: %w", err)
	}
	files, err := os.ReadDir(w.dir)
	if err != nil {
		return nil, fmt.Errorf("open workload certificates: %w", err)
	}
	for _, f := range files {
		workload, ok := strings.CutSuffix(f.Name(), ".crt")
		if !ok || placement.CheckName(workload) != nil {
			continue
		}
		if b, err := os.ReadFile(filepath.Join(w.dir, f.Name())); err == nil {
			_ = w.adopt(workload, b) // unusable: as if it were not there
		}
	}
	return w, nil
}

func (w *WorkloadCertificates) path(workload, ext string) string {
	return filepath.Join(w.dir, workload+ext)
}

func (w *WorkloadCertificates) adopt(workload string, certPEM []byte) error {
	key, err := readKey(w.path(workload, ".key"))
	if err != nil {
		return err
	}
	cert, err := parseCertificate(certPEM)
	if err != nil {
		return err
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return errors.New("the certificate does not belong to the key")
	}
	if err := w.identity.checkWorkload(cert, placement.ServerName(workload)); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.certs[workload] = &tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
	return nil
}

// Get returns the certificate of a workload, or ErrNoCertificate. It never
// waits for the CA.
func (w *WorkloadCertificates) Get(workload string) (*tls.Certificate, error) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if c := w.certs[workload]; c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("%w: %s", ErrNoCertificate, workload)
}

func (w *WorkloadCertificates) bySNI(sni string) (*tls.Certificate, error) {
	workload, ok := WorkloadOfServerName(sni)
	if !ok {
		return nil, fmt.Errorf("%w: server name %q", ErrNoCertificate, sni)
	}
	return w.Get(workload)
}

// Ensure returns when there is a good certificate for the workload, asking
// the CA if there is none or it is due for renewal. Calls for the same
// workload share one request. With a certificate that is only due, an
// unreachable CA is an error although Get still answers.
func (w *WorkloadCertificates) Ensure(ctx context.Context, workload string) error {
	if err := placement.CheckName(workload); err != nil {
		return err
	}
	for {
		w.mu.Lock()
		if c := w.certs[workload]; c != nil && time.Until(c.Leaf.NotAfter) > renewLeft {
			w.mu.Unlock()
			return nil
		}
		running := w.busy[workload]
		if running == nil {
			running = make(chan struct{})
			w.busy[workload] = running
			w.mu.Unlock()
			err := w.request(ctx, workload)
			w.mu.Lock()
			delete(w.busy, workload)
			w.mu.Unlock()
			close(running)
			return err
		}
		w.mu.Unlock()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-running:
		}
	}
}

func (w *WorkloadCertificates) request(ctx context.Context, workload string) error {
	key, err := openKey(w.path(workload, ".key"))
	if err != nil {
		return fmt.Errorf("certificate of workload %s: %w", workload, err)
	}
	csr, err := newCSR(key, workload)
	if err != nil {
		return err
	}
	certPEM, err := w.identity.ask(ctx, w.signer, csr, workload)
	if err != nil {
		return fmt.Errorf("certificate of workload %s: %w", workload, err)
	}
	if err := w.adopt(workload, certPEM); err != nil {
		return fmt.Errorf("certificate of workload %s: the CA's answer: %w", workload, err)
	}
	return writeFile(w.path(workload, ".crt"), certPEM, publicMode)
}

// Run renews the certificates while the process runs. A failed attempt is
// handed to report (may be nil) and tried again; Run ends with ctx.
func (w *WorkloadCertificates) Run(ctx context.Context, report func(error)) error {
	return renewLoop(ctx, report, func(ctx context.Context) (time.Time, error) {
		next := time.Now().Add(renewTick)
		var errs []error
		for _, workload := range w.names() {
			c, err := w.Get(workload)
			if err != nil {
				continue
			}
			if due := c.Leaf.NotAfter.Add(-renewLeft); time.Now().Before(due) {
				next = earlier(next, due)
				continue
			}
			errs = append(errs, w.Ensure(ctx, workload))
		}
		return next, errors.Join(errs...)
	})
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func (w *WorkloadCertificates) names() []string {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return slices.Sorted(maps.Keys(w.certs))
}
