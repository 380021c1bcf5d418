package render_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/opfield/availability/ingress/render"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// Pieces that mean something to nginx, to a regular expression or to a
// parser, and some that look harmless.
func pieces() []string {
	return []string{
		";", "{", "}", `"`, "'", `\`, "$", "${host}", "#", "\r", "\n", "\x00", "~", "=", "@", "*", "..", "/", ".", " ", "\t",
		"a", "b-c", "example", "xn--", "é", "日本", "\u2028", "\u0085", "\xff", "(", ")", "[", "]", "|", "+", "?", "^", "%00", "opfvalue000000001x",
		"return 200 pwned;", strings.Repeat("a", 64<<10),
	}
}

func hostile() *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		return strings.Join(rapid.SliceOfN(rapid.SampledFrom(pieces()), 0, 5).Draw(t, "pieces"), "")
	})
}

// Whatever stands in any field: it is refused, or the file that is rendered
// is the one that was meant (Render compares the trees itself).
func TestRender_HostileFields(t *testing.T) { // RTE-7, SEC-3
	r, err := render.New(config(t))
	require.NoError(t, err)
	rapid.Check(t, func(t *rapid.T) {
		field := func(good string) string {
			if rapid.IntRange(0, 2).Draw(t, "hostile") > 0 {
				return good
			}
			return hostile().Draw(t, "value")
		}
		route := upstream.Route{
			Name: field("r"), Hosts: []string{field("a.example"), "*." + field("b.example")}, Path: "/" + field("p.x"),
			Protocol: placement.Protocol(field("http")), Workload: field("w"), Port: 80,
		}
		switch rapid.IntRange(0, 2).Draw(t, "tls") {
		case 1:
			route.TLS = &upstream.RouteTLS{Cert: field("c")}
		case 2:
			route.TLS = &upstream.RouteTLS{CertFile: "/" + field("c"), KeyFile: "/" + field("k")}
		}
		in := render.Input{
			Routes: []upstream.Route{route}, Address: addresses(), Certs: map[string]string{route.Name: field("c")},
			Services: []upstream.Service{{Workload: "w", Port: 80, Open: []placement.LinkID{link("w", "n1", 80)}}},
		}
		g, err := r.Render(in)
		if err != nil {
			if len(err.Error()) > 20_000 || strings.ContainsAny(err.Error(), "\x00\r\n") {
				t.Fatalf("the error repeats the value: %q", err)
			}
			return
		}
		for _, f := range g.Files {
			if strings.Contains(string(f.Data), "pwned") {
				t.Fatalf("%+v reached %s", route, f.Name)
			}
		}
	})
}

// Every single hostile piece in every single field, alone and at both ends.
func TestRender_HostilePieces(t *testing.T) { // RTE-7, SEC-3
	r, err := render.New(config(t))
	require.NoError(t, err)
	fields := map[string]func(*upstream.Route, string){
		"name":     func(r *upstream.Route, s string) { r.Name = s },
		"host":     func(r *upstream.Route, s string) { r.Hosts = []string{s} },
		"path":     func(r *upstream.Route, s string) { r.Path = s },
		"workload": func(r *upstream.Route, s string) { r.Workload = s },
		"protocol": func(r *upstream.Route, s string) { r.Protocol = placement.Protocol(s) },
		"cert":     func(r *upstream.Route, s string) { r.TLS = &upstream.RouteTLS{Cert: s} },
		"certFile": func(r *upstream.Route, s string) { r.TLS = &upstream.RouteTLS{CertFile: s, KeyFile: "/k"} },
	}
	for name, set := range fields {
		for _, p := range pieces() {
			for _, s := range []string{p, "a" + p, p + "a", "/" + p, "/a" + p, "/a/" + p + "/b"} {
				route := upstream.Route{Name: "r", Hosts: []string{"a.example"}, Workload: "w", Port: 80}
				set(&route, s)
				g, err := r.Render(render.Input{Routes: []upstream.Route{route}, Address: addresses()})
				if err != nil {
					require.NotContains(t, err.Error(), "pwned")
					continue
				}
				require.NotContains(t, string(g.Files[1].Data), "pwned", "%s %q", name, s)
				require.NotErrorIs(t, err, render.ErrNotMeant, "the allow-list comes first: %s %q", name, s)
			}
		}
	}
}
