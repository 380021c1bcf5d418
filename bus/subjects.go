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

	BucketPolicies = "opfield_policies" // key: workload; read by the controller only
	BucketMembers  = "opfield_members"  // key: workload; value: JSON placement.Members
	// BucketDesired: key <node>: the index, JSON workload → revision; key
	// <node>.<workload>: JSON placement.Desired. A node reads its own only.
	BucketDesired = "opfield_desired"
	BucketLeader  = "opfield_leader" // which controller decides
	BucketNodes   = "opfield_nodes"  // key: node id; value: JSON, what operators decided about it
)

// Buckets returns the names of all buckets.
func Buckets() []string {
	return []string{
		BucketRoutes, BucketCerts, BucketRelays, BucketRevoked,
		BucketPolicies, BucketMembers, BucketDesired, BucketLeader, BucketNodes,
	}
}

// readersBuckets are those that OPFIELD_READ has any way to.
func readersBuckets() []string {
	return []string{BucketRoutes, BucketCerts, BucketRelays, BucketRevoked, BucketMembers}
}

const (
	streamPlacements = "OPFIELD_PLACEMENTS"
	streamNodes      = "OPFIELD_NODES"
	streamAudit      = "OPFIELD_AUDIT"

	subjectPlacements = placement.SubjectPrefix + ">"
	subjectNodes      = "opfield.node.v1."
	subjectAudit      = "opfield.audit.v1."
	subjectStatus     = "opfield.status.v1."
	subjectInventory  = "opfield.inventory.v1."
	subjectSign       = "opfield.identity.v1."
	subjectLast       = "opfield.last.v1." // a node asks for its last events
	subjectChanged    = "opfield.kv."      // every change of a bucket, without its value
	subjectRead       = "opfield.read."    // direct get of a stream of the store account
	subjectReport     = "opfield.report.v1."
	subjectInspect    = "opfield.inspect.v1."   // the controller asks a node
	subjectInspected  = "opfield.inspected.v1." // and gets the answer below it

	accountShared  = "OPFIELD"       // nodes and the controller
	accountReaders = "OPFIELD_READ"  // ingress nodes, relays and subscribers
	accountStore   = "OPFIELD_STORE" // the controller's store identity
)

// accountOf returns the account an identity lives in.
func accountOf(n identity.Name) string {
	switch {
	case n == identity.StoreName():
		return accountStore
	case n.Role == identity.RoleController, n.Role == identity.RoleNode:
		return accountShared
	default:
		return accountReaders
	}
}

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

const directGet = "$JS.API.DIRECT.GET."

// readSubject returns where n sends a direct get of a stream.
func readSubject(n identity.Name, stream string) string {
	account := accountOf(n)
	if account == accountStore || account == accountShared && stream == streamPlacements {
		return directGet + stream
	}
	return subjectRead + stream
}

// readDesired returns where a node asks for one of its keys in BucketDesired.
// A direct get of a whole stream names its filter in the payload, which no
// permission sees; here the key is in the subject.
func readDesired(key string) string { return subjectRead + kvStream(BucketDesired) + "." + key }

// kvSubject returns the subject under which a bucket stores a key.
func kvSubject(bucket, key string) string { return "$KV." + bucket + "." + key }

// storeStreams are the streams of the store account that the holders of
// buckets read.
func storeStreams(buckets []string) []string {
	out := []string{streamNodes}
	for _, b := range buckets {
		out = append(out, kvStream(b))
	}
	return out
}

// account is one account of a nats-server configuration.
type account struct {
	jetStream        string
	imports, exports strings.Builder
}

func (a *account) exportStream(subject string) {
	fmt.Fprintf(&a.exports, "      { stream: %q }\n", subject)
}

func (a *account) exportService(subject string) {
	fmt.Fprintf(&a.exports, "      { service: %q, response_type: stream }\n", subject)
}

func (a *account) importStream(from, subject string) {
	fmt.Fprintf(&a.imports, "      { stream: { account: %s, subject: %q } }\n", from, subject)
}

func (a *account) importService(from, subject, to string) {
	fmt.Fprintf(&a.imports, "      { service: { account: %s, subject: %q }, to: %q }\n", from, subject, to)
}

// accountsConfig is the accounts block of a nats-server configuration. users
// has the users of each account; embedded, they follow from certificates.
func accountsConfig(users map[string]string) string {
	store, shared, readers := &account{jetStream: "enabled"}, &account{jetStream: "enabled"}, &account{jetStream: "disabled"}
	for _, s := range []string{subjectChanged + ">", subjectNodes + ">", subjectAudit + ">"} {
		store.exportStream(s)
		shared.importStream(accountStore, s)
	}
	readers.importStream(accountStore, subjectNodes+">")
	for _, b := range readersBuckets() {
		readers.importStream(accountStore, subjectChanged+b+".>")
	}
	for _, s := range append(storeStreams(Buckets()), streamAudit) {
		store.exportService(directGet + s)
		shared.importService(accountStore, directGet+s, subjectRead+s)
	}
	for _, s := range storeStreams(readersBuckets()) {
		readers.importService(accountStore, directGet+s, subjectRead+s)
	}
	key := directGet + kvStream(BucketDesired) + "." + kvSubject(BucketDesired, ">")
	store.exportService(key)
	shared.importService(accountStore, key, readDesired(">"))
	shared.exportStream(subjectPlacements)
	readers.importStream(accountShared, subjectPlacements)
	shared.exportService(directGet + streamPlacements)
	readers.importService(accountShared, directGet+streamPlacements, subjectRead+streamPlacements)
	shared.exportService(subjectSign + ">")
	readers.importService(accountShared, subjectSign+">", subjectSign+">")
	readers.exportStream(subjectStatus + ">")
	shared.importStream(accountReaders, subjectStatus+">")

	var out strings.Builder
	out.WriteString("accounts {\n")
	for _, a := range []struct {
		name string
		*account
	}{{accountShared, shared}, {accountReaders, readers}, {accountStore, store}} {
		fmt.Fprintf(&out, "  %s: {\n    jetstream: %s\n    imports: [\n%s    ]\n    exports: [\n%s    ]\n%s  }\n",
			a.name, a.jetStream, a.imports.String(), a.exports.String(), users[a.name])
	}
	out.WriteString("}\n")
	return out.String()
}
