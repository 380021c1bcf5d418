package upstream_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

func TestNormaliseHost(t *testing.T) { // RTE-11
	for in, want := range map[string]string{
		"Example.COM.":                     "example.com",
		"*.Example.com":                    "*.example.com",
		"bücher.example":                   "xn--bcher-kva.example",
		"BÜCHER.example":                   "xn--bcher-kva.example",
		"localhost":                        "localhost",
		"10.0.0.1":                         "10.0.0.1",
		strings.Repeat("a.", 126) + "a":    strings.Repeat("a.", 126) + "a",
		strings.Repeat("a", 63) + ".com":   strings.Repeat("a", 63) + ".com",
		strings.Repeat("a", 64) + ".com":   "",
		strings.Repeat("a.", 127) + "a.ab": "",
		"":                                 "", ".": "", "*": "", "*.": "", "a..b": "", "-a.b": "", "a_b.c": "",
		"a b": "", "a;b": "", "~a": "", "=a": "", "@a": "", "#a": "", `a\`: "", `"a"`: "", "a\nb": "", "a\x00": "",
		"*.*.a": "", "a.*.b": "", "$host": "", "..": "", "{}": "", "xn--a": "",
	} {
		got, err := upstream.NormaliseHost(in)
		if want == "" {
			require.Error(t, err, "%q gave %q", in, got)
			continue
		}
		require.NoError(t, err, in)
		require.Equal(t, want, got)
	}
}

func TestRoute_AllProblemsAtOnce(t *testing.T) { // SEC-3
	r := upstream.Route{
		Name: "Bad Name", Hosts: []string{"ok.example", "bad;host"}, Path: "/a/../b", Workload: "w;",
		Listen: 80, TLS: &upstream.RouteTLS{Cert: "a", CertFile: "/x"},
		Settings: upstream.RouteSettings{BufferKB: 1, ReadTimeout: -1},
	}
	var ps upstream.Problems
	require.ErrorAs(t, r.Check(), &ps)
	for _, code := range []upstream.Code{
		upstream.CodeName, upstream.CodeHost, upstream.CodePath, upstream.CodeListen, upstream.CodeTLS,
		upstream.CodeWorkload, upstream.CodePort, upstream.CodeSettings,
	} {
		require.True(t, ps.Has(code), "%s in %v", code, ps)
	}
	require.Contains(t, ps.Error(), "hosts[1]")
}

func TestRoute_TCP(t *testing.T) {
	r := upstream.Route{Name: "db", Protocol: placement.ProtocolTCP, Workload: "db", Port: 5432, Listen: 15432}
	require.NoError(t, r.Check())
	r.TLS = &upstream.RouteTLS{Cert: "x"}
	require.ErrorContains(t, r.Check(), "tls:")
}

func TestRoute_JSON(t *testing.T) {
	var r upstream.Route
	require.NoError(t, json.Unmarshal([]byte(`{"name":"a","hosts":["A.example"],"workload":"w","port":80,"settings":{"readTimeout":"90s"}}`), &r))
	n, err := r.Normalised()
	require.NoError(t, err)
	out, err := json.Marshal(n)
	require.NoError(t, err)
	require.JSONEq(t, `{"name":"a","hosts":["a.example"],"path":"/","protocol":"http","workload":"w","port":80,"settings":{"readTimeout":"1m30s"}}`, string(out))
}

func TestRoute_NormalisedTwiceIsTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := upstream.Route{
			Name: "r", Workload: "w", Port: 1,
			Hosts: rapid.SliceOfN(rapid.String(), 1, 3).Draw(t, "hosts"),
			Path:  rapid.StringMatching(`/[a-z./]{0,8}`).Draw(t, "path"),
		}
		once, err := r.Normalised()
		if err != nil {
			return
		}
		twice, err := once.Normalised()
		if err != nil {
			t.Fatal(err)
		}
		if a, b := mustJSON(once), mustJSON(twice); a != b {
			t.Fatalf("%s then %s", a, b)
		}
	})
}

func mustJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}
