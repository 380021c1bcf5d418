// Package identitytest makes identities for tests: a CA in a temporary
// directory and everything it can issue, with no network.
package identitytest

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/opfield/availability/identity"
)

// CA is a certificate authority that lives as long as the test.
type CA struct {
	*identity.CA
}

// New creates a CA.
func New(t testing.TB) *CA {
	t.Helper()
	ca, err := identity.OpenCA(filepath.Join(t.TempDir(), "ca"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ca.Close() })
	return &CA{CA: ca}
}

// Identity issues an identity. A node may serve every workload.
func (ca *CA) Identity(t testing.TB, role identity.Role, id string) *identity.Identity {
	t.Helper()
	if role == identity.RoleNode {
		return ca.Node(t, id, identity.GrantAll())
	}
	hosts := []string{"127.0.0.1", "localhost"}
	i, err := ca.Local(t.TempDir(), identity.Name{Role: role, ID: id}, identity.Bootstrap{}, hosts)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// Controller issues the identity of the controller.
func (ca *CA) Controller(t testing.TB) *identity.Identity {
	t.Helper()
	return ca.Identity(t, identity.RoleController, identity.ControllerName().ID)
}

// Node issues the identity of a node that may serve what grant allows.
func (ca *CA) Node(t testing.TB, id string, grant identity.Grant) *identity.Identity {
	t.Helper()
	i, err := ca.LocalNode(t.TempDir(), id, identity.Bootstrap{}, grant)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// Workloads issues certificates for the named workloads of node i.
func (ca *CA) Workloads(t testing.TB, i *identity.Identity, names ...string) *identity.WorkloadCertificates {
	t.Helper()
	w, err := i.Workloads(ca)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := w.Ensure(context.Background(), name); err != nil {
			t.Fatal(err)
		}
	}
	return w
}
