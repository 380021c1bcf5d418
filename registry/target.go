package registry

import (
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"

	"github.com/opfield/availability/placement"
)

// operation is what a request wants.
type operation uint8

const (
	ping operation = iota + 1
	pull           // also the question whether something is there
	push
)

func (o operation) String() string {
	switch o {
	case ping:
		return "ping"
	case pull:
		return "pull"
	case push:
		return "push"
	default:
		return "other"
	}
}

// target is what a request is about.
type target struct {
	operation  operation
	repository string
	blob       digest.Digest // of a request for a blob
	mount      bool          // the upload may be replaced by a blob of another repository
	from       string        // that repository
}

// maxDepth bounds the components of a repository's name.
const maxDepth = 4

// reserved cannot be components of a repository's name, so that a path has one
// meaning only.
func reserved() []string { return []string{"manifests", "blobs", "tags", "uploads", "referrers"} }

var (
	tagOrDigest = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$|^sha256:[0-9a-f]{64}$`)
	uploadID    = regexp.MustCompile(`^[A-Za-z0-9-]{8,64}$`)
)

// CheckRepository reports why a repository cannot have this name: components
// that are names, separated by '/'.
func CheckRepository(name string) bool {
	parts := strings.Split(name, "/")
	return len(parts) <= maxDepth && !slices.ContainsFunc(parts, func(p string) bool {
		return placement.CheckName(p) != nil || slices.Contains(reserved(), p)
	})
}

// parse understands the requests that pulls and pushes consist of; false: it
// is something else, such as the catalog or a deletion.
func parse(r *http.Request) (target, bool) {
	path, ok := strings.CutPrefix(r.URL.Path, "/v2/")
	if !ok || r.URL.RawPath != "" || strings.Contains(path, "//") {
		return target{}, false
	}
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	if path == "" {
		return target{operation: ping}, reads
	}
	parts := strings.Split(path, "/")
	i := slices.IndexFunc(parts, func(p string) bool { return p == "manifests" || p == "blobs" })
	if i < 1 {
		return target{}, false
	}
	t := target{repository: strings.Join(parts[:i], "/")}
	if !CheckRepository(t.repository) {
		return target{}, false
	}
	kind, rest := parts[i], parts[i+1:]
	switch {
	case kind == "manifests" && len(rest) == 1 && tagOrDigest.MatchString(rest[0]):
		t.operation = pull
		if r.Method == http.MethodPut {
			t.operation = push
			return t, true
		}
		return t, reads
	case kind == "blobs" && len(rest) == 1:
		t.operation, t.blob = pull, digest.Digest(rest[0])
		return t, reads && t.blob.Validate() == nil
	case kind == "blobs" && len(rest) == 2 && rest[0] == "uploads" && rest[1] == "":
		t.operation = push
		q := r.URL.Query()
		t.mount, t.from = q.Has("mount"), q.Get("from")
		return t, r.Method == http.MethodPost && len(q["mount"]) <= 1 && len(q["from"]) <= 1
	case kind == "blobs" && len(rest) == 2 && rest[0] == "uploads" && uploadID.MatchString(rest[1]):
		t.operation = push
		return t, reads || r.Method == http.MethodPatch || r.Method == http.MethodPut
	default:
		return target{}, false
	}
}
