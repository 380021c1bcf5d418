// Package identity owns who is who: the certificate authority of the
// controller, the identities of every process (a certificate with a role and
// an id), workload certificates, join tokens, renewal and revocation, and the
// TLS configurations made from them.
//
// It does not own what an identity may do: permissions on NATS belong to
// package bus, and each listener names the roles it serves.
//
// Keys are ECDSA P-256 and never leave the directory in which they were made.
// A renewal keeps the key and replaces one file by rename, so a crash leaves
// either the old or the new certificate, never half a pair; joining again
// makes a new key.
//
// CA, Identity, WorkloadCertificates and Joiner may be used by several
// goroutines at the same time.
package identity
