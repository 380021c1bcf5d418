package render

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// The comparison alone, without any allow-list in front of it, finds every
// known way out of a value.
func TestCompare_FindsBreakOut(t *testing.T) { // RTE-7
	const text = "server { server_name \"%s\" \"%s\"; add_header X-A \"%s\"; }\n"
	for _, c := range []struct {
		values [3]string
		same   bool
	}{
		{[3]string{"a.example", "b.example", "c"}, true},
		{[3]string{"*.a.example", "~x", "[.]"}, true},
		{[3]string{`a \`, "; return 200 pwn; #", "c"}, false},
		{[3]string{"a", `b"; return 200 pwn; #`, "c"}, false},
		{[3]string{"a", "b", "c\"; }\nserver { return 200 \"pwn"}, false},
		{[3]string{`a" "b`, "b", "c"}, false},
	} {
		meant := &placeholders{}
		var words [3]any
		var real [3]any
		for i, v := range c.values {
			w, err := meant.value(v)
			require.NoError(t, err)
			words[i], real[i] = w, v
		}
		want, err := parse(HTTPFile, fmt.Appendf(nil, text, words[:]...))
		require.NoError(t, err)
		is, err := parse(HTTPFile, fmt.Appendf(nil, text, real[:]...))
		if err == nil {
			err = sameBlock(HTTPFile, is, want, meant)
		}
		if c.same {
			require.NoError(t, err)
			continue
		}
		require.Error(t, err, "%q", c.values)
	}
}

func TestParseBuild(t *testing.T) {
	b, err := ParseBuild("nginx version: nginx/1.22.1\nconfigure arguments: --with-http_ssl_module --with-http_v2_module --modules-path=/m --with-stream=dynamic")
	require.NoError(t, err)
	require.Equal(t, Build{Major: 1, Minor: 22, Patch: 1, HTTP2: true, Stream: true, StreamDynamic: true, ModulesPath: "/m"}, b)
	require.True(t, b.AtLeast(1, 22, 1))
	require.False(t, b.AtLeast(1, 25, 1))
	_, err = ParseBuild("nginx version: nginx/1.18.0 --with-http_ssl_module")
	require.ErrorIs(t, err, ErrBuild)
	_, err = ParseBuild("nope")
	require.ErrorIs(t, err, ErrBuild)
}
