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
	users := map[string]string{}
	for _, m := range members {
		if err := m.Name.Check(); err != nil {
			return "", err
		}
		if !m.Revoked {
			users[accountOf(m.Name)] += user(m)
		}
	}
	for account, list := range users {
		users[account] = "    users: [\n" + list + "    ]\n"
	}
	return "# add: jetstream { store_dir: ... }\n" +
		"# add: tls { cert_file: ..., key_file: ..., ca_file: <the controller's ca.crt>, verify_and_map: true, min_version: \"1.3\" }\n" +
		accountsConfig(users), nil
}

// user maps the certificate by its DNS name.
func user(m identity.Member) string {
	r := rightsOf(m.Name, m.Grant)
	return fmt.Sprintf("      { user: %q, permissions: { publish: { allow: [%s] }, subscribe: { allow: [%s] } } }\n",
		m.Name.ServerName(), quoted(r.publish), quoted(r.subscribe))
}

func quoted(list []string) string {
	out := slices.Clone(list)
	for i, s := range out {
		out[i] = fmt.Sprintf("%q", s)
	}
	return strings.Join(out, ", ")
}
