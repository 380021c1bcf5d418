package registry

import (
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzParse: a path that is let through has one meaning only: it is made of
// the repository and what follows from the rest.
func FuzzParse(f *testing.F) {
	const d = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	for _, seed := range [][2]string{
		{"GET", "/v2/"}, {"GET", "/v2/web/manifests/" + d}, {"PUT", "/v2/team/web/manifests/g1"}, {"HEAD", "/v2/web/blobs/" + d},
		{"POST", "/v2/web/blobs/uploads/"}, {"PATCH", "/v2/web/blobs/uploads/0123-4567"}, {"GET", "/v2/a/manifests/b/blobs/" + d},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, method, path string) {
		got, ok := parse(&http.Request{Method: method, URL: &url.URL{Path: path}})
		if !ok {
			return
		}
		require.NotEqual(t, http.MethodDelete, method)
		if got.operation == ping {
			require.Equal(t, "/v2/", path)
			return
		}
		require.True(t, CheckRepository(got.repository))
		rest := path[len("/v2/"+got.repository):]
		require.Regexp(t, `^/(manifests/[^/]+|blobs/[^/]+|blobs/uploads/[^/]*)$`, rest)
		if method != http.MethodGet && method != http.MethodHead {
			require.Equal(t, push, got.operation)
		}
	})
}
