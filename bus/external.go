package bus

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opfield/availability/identity"
)

// ExternalConfig returns the part of a nats-server configuration that gives
// every member the same rights as the embedded server does. The user adds
// listeners, JetStream and a tls block with verify_and_map: true, and the
// controller's CA as ca_file.
func ExternalConfig(members []identity.Member) (string, error) {
	var shared, store strings.Builder
	shared.WriteString("    users: [\n")
	store.WriteString("    users: [\n")
	for _, m := range members {
		if err := m.Name.Check(); err != nil {
			return "", err
		}
		switch {
		case m.Revoked:
		case m.Name == identity.StoreName():
			writeUser(&store, m)
		default:
			writeUser(&shared, m)
		}
	}
	shared.WriteString("    ]\n")
	store.WriteString("    ]\n")
	return "# add: jetstream { store_dir: ... }\n" +
		"# add: tls { cert_file: ..., key_file: ..., ca_file: <the controller's ca.crt>, verify_and_map: true, min_version: \"1.3\" }\n" +
		accountsConfig(shared.String(), store.String()), nil
}

// writeUser maps the certificate by its DNS name.
func writeUser(b *strings.Builder, m identity.Member) {
	r := rightsOf(m.Name, m.Grant)
	fmt.Fprintf(b, "      { user: %q, permissions: { publish: { allow: [%s] }, subscribe: { allow: [%s] } } }\n",
		m.Name.ServerName(), quoted(r.publish), quoted(r.subscribe))
}

func quoted(list []string) string {
	out := slices.Clone(list)
	for i, s := range out {
		out[i] = fmt.Sprintf("%q", s)
	}
	return strings.Join(out, ", ")
}
