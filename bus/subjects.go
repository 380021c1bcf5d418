package bus

import (
	"fmt"
	"strings"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

// The buckets. Only Store writes them.
const (
	BucketRoutes  = "opfield_routes"  // key: route name; value: JSON route
	BucketCerts   = "opfield_certs"   // key: certificate name; value: PEM pair; ingress only
	BucketRelays  = "opfield_relays"  // key: relay id; value: JSON identity.RelayAddress
	BucketRevoked = "opfield_revoked" // key: role.id; value: JSON identity.Revocation
)

// Buckets returns the names of all buckets.
func Buckets() []string { return []string{BucketRoutes, BucketCerts, BucketRelays, BucketRevoked} }

const (
	streamPlacements = "OPFIELD_PLACEMENTS"
	streamNodes      = "OPFIELD_NODES"

	subjectPlacements = placement.SubjectPrefix + ">"
	subjectNodes      = "opfield.node.v1."
	subjectStatus     = "opfield.status.v1."
	subjectSign       = "opfield.identity.v1."
	subjectLast       = "opfield.last.v1." // a node asks for its last events
	subjectChanged    = "opfield.kv."      // every change of a bucket, without its value
	subjectRead       = "opfield.read."    // direct get of a stream of the store account

	accountShared = "OPFIELD"
	accountStore  = "OPFIELD_STORE"
)

func kvStream(bucket string) string { return "KV_" + bucket }

func inboxPrefix(n identity.Name) string { return "_INBOX." + string(n.Role) + "." + n.ID }

// member returns the subject on which only n publishes.
func member(prefix string, n identity.Name) string { return prefix + string(n.Role) + "." + n.ID }

// memberOf is the reverse of member.
func memberOf(prefix, subject string) (identity.Name, error) {
	role, id, _ := strings.Cut(strings.TrimPrefix(subject, prefix), ".")
	n := identity.Name{Role: identity.Role(role), ID: id}
	return n, n.Check()
}

// readSubject returns where a direct get of a stream is sent.
func readSubject(stream string) string {
	if stream == streamPlacements {
		return "$JS.API.DIRECT.GET." + stream
	}
	return subjectRead + stream
}

// storeStreams are the streams of the store account that others read.
func storeStreams() []string {
	out := []string{streamNodes}
	for _, b := range Buckets() {
		out = append(out, kvStream(b))
	}
	return out
}

// accountsConfig is the accounts block of a nats-server configuration; users
// may be empty (embedded: they follow from certificates).
func accountsConfig(sharedUsers, storeUsers string) string {
	var imports, exports strings.Builder
	for _, s := range []string{subjectChanged + ">", subjectNodes + ">"} {
		fmt.Fprintf(&exports, "      { stream: %q }\n", s)
		fmt.Fprintf(&imports, "      { stream: { account: %s, subject: %q } }\n", accountStore, s)
	}
	for _, s := range storeStreams() {
		get := "$JS.API.DIRECT.GET." + s
		fmt.Fprintf(&exports, "      { service: %q, response_type: stream }\n", get)
		fmt.Fprintf(&imports, "      { service: { account: %s, subject: %q }, to: %q }\n", accountStore, get, subjectRead+s)
	}
	return fmt.Sprintf(`accounts {
  %s: {
    jetstream: enabled
    imports: [
%s    ]
%s  }
  %s: {
    jetstream: enabled
    exports: [
%s    ]
%s  }
}
`, accountShared, imports.String(), sharedUsers, accountStore, exports.String(), storeUsers)
}
