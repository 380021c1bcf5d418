package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"time"
)

// Run renews the certificate while the process runs. A failed attempt is
// handed to report (may be nil) and tried again; Run ends with ctx.
func (i *Identity) Run(ctx context.Context, signer Signer, report func(error)) error {
	return renewLoop(ctx, report, func(ctx context.Context) (time.Time, error) {
		due := i.Expires().Add(-renewLeft)
		if time.Now().Before(due) {
			return due, nil
		}
		err := i.renew(ctx, signer)
		return i.Expires().Add(-renewLeft), err
	})
}

// renewLoop calls step again when it says, after an error with back-off.
func renewLoop(ctx context.Context, report func(error), step func(context.Context) (time.Time, error)) error {
	retry := retryFirst
	for {
		next, err := step(ctx)
		wait := min(time.Until(next), renewTick) // a suspended clock is noticed
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			if report != nil {
				report(err)
			}
			wait = retry + mrand.N(retry/4)
			retry = min(2*retry, retryMax)
		default:
			retry = retryFirst
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

func (i *Identity) renew(ctx context.Context, signer Signer) error {
	csr, err := newCSR(i.key, i.Name().ID)
	if err != nil {
		return err
	}
	certPEM, err := i.ask(ctx, signer, csr, "")
	if err != nil {
		return fmt.Errorf("renew certificate of %s: %w", i.Name(), err)
	}
	if err := i.install(certPEM); err != nil {
		return fmt.Errorf("renew certificate of %s: %w", i.Name(), err)
	}
	return nil
}

// ask adds the proof and sends the request.
func (i *Identity) ask(ctx context.Context, signer Signer, csrPEM []byte, workload string) ([]byte, error) {
	block, _ := pem.Decode(csrPEM)
	proof, err := ecdsa.SignASN1(rand.Reader, i.key, proofDigest(workload, block.Bytes))
	if err != nil {
		return nil, err
	}
	return signer.Sign(ctx, csrPEM, SignRequest{
		Workload:    workload,
		Certificate: encodeCertificate(i.cert.Load().Certificate[0]),
		Proof:       proof,
	})
}

// checkWorkload verifies a certificate for a workload of this identity.
func (i *Identity) checkWorkload(cert *x509.Certificate, serverName string) error {
	if err := cert.CheckSignatureFrom(i.ca); err != nil {
		return err
	}
	if time.Now().After(cert.NotAfter) {
		return errors.New("it has expired")
	}
	return cert.VerifyHostname(serverName)
}
