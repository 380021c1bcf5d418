package render_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/opfield/availability/ingress/ingresstest"
	"github.com/opfield/availability/ingress/render"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// scenario is one input file of testdata.
type scenario struct {
	Proves     string           `yaml:"proves"`
	Version    string           `yaml:"version"` // rendered for it, but not tried; "" = the installed one
	Include    bool             `yaml:"include"`
	Trusted    []netip.Prefix   `yaml:"trusted"`
	GRPCPort   uint16           `yaml:"plainGRPCPort"`
	Routes     []upstream.Route `yaml:"routes"`
	Placements []struct {
		Workload string
		Port     uint16
		Open     []string
		Others   []string
	} `yaml:"placements"`
	Certs map[string]string `yaml:"certs"`
}

func (s scenario) input() render.Input {
	in := render.Input{Routes: s.Routes, Certs: s.Certs, Address: addresses()}
	for _, p := range s.Placements {
		service := upstream.Service{Workload: p.Workload, Port: p.Port}
		for _, n := range p.Open {
			service.Open = append(service.Open, link(p.Workload, n, p.Port))
		}
		for _, n := range p.Others {
			service.Others = append(service.Others, link(p.Workload, n, p.Port))
		}
		in.Services = append(in.Services, service)
	}
	return in
}

func link(workload, node string, port uint16) placement.LinkID {
	return placement.LinkID{Placement: placement.ID{Workload: workload, Node: node}, Port: port}
}

// addresses numbers the links by their node: "n7" is 127.64.1.7.
func addresses() func(placement.LinkID) (netip.Addr, bool) {
	return func(id placement.LinkID) (netip.Addr, bool) {
		var n byte
		_, err := fmt.Sscanf(id.Placement.Node, "n%d", &n)
		return netip.AddrFrom4([4]byte{127, 64, 1, n}), err == nil
	}
}

func installed(t testing.TB) render.Build {
	out, err := exec.Command("nginx", "-V").CombinedOutput()
	require.NoError(t, err, "nginx must be installed: %s", out)
	b, err := render.ParseBuild(string(out))
	require.NoError(t, err)
	return b
}

func config(t testing.TB) render.Config {
	c := render.DefaultConfig()
	c.Build = installed(t)
	c.RunDir, c.LogDir, c.SocketDir, c.CertDir = "/run/opfield/nginx", "/var/log/opfield", "/run/opfield/nginx/sockets", "/var/lib/opfield/certs"
	c.ClientCert, c.ClientKey, c.ClientCA = "/etc/opfield/identity/identity.crt", "/etc/opfield/identity/identity.key", "/etc/opfield/identity/ca.crt"
	c.HTTPPort, c.HTTPSPort = 18080, 18443
	c.Connections = 512
	return c
}

// accepted runs nginx -t over the files, moved to a folder of the test.
func accepted(t testing.TB, g render.Generation) {
	t.Helper()
	dir := t.TempDir()
	ca := ingresstest.NewCA(t)
	ca.WriteIdentity(t, filepath.Join(dir, "id"))
	for _, d := range []string{"run/tmp", "log", "run/sockets", "certs"} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, d), 0o700))
	}
	for _, f := range g.Files {
		text := strings.NewReplacer(
			"/run/opfield/nginx", filepath.Join(dir, "run"),
			"/var/log/opfield", filepath.Join(dir, "log"),
			"/var/lib/opfield/certs", filepath.Join(dir, "certs"),
			"/etc/opfield/identity", filepath.Join(dir, "id"),
		).Replace(string(f.Data))
		require.NoError(t, os.WriteFile(filepath.Join(dir, f.Name), []byte(text), 0o600))
	}
	out, err := exec.Command("nginx", "-t", "-e", filepath.Join(dir, "log", "e.log"), "-p", dir, "-c", filepath.Join(dir, "nginx.conf")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NotContains(t, string(out), "[warn]")
}

func TestRender_Golden(t *testing.T) { // RTE-1, RTE-2, RTE-5, RTE-7
	inputs, err := filepath.Glob("testdata/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, inputs)
	for _, name := range inputs {
		t.Run(filepath.Base(name), func(t *testing.T) {
			text, err := os.ReadFile(name)
			require.NoError(t, err)
			var s scenario
			dec := yaml.NewDecoder(strings.NewReader(string(text)))
			dec.KnownFields(true)
			require.NoError(t, dec.Decode(&s))
			require.NotEmpty(t, s.Proves)
			c := config(t)
			c.Trusted, c.PlainGRPCPort = s.Trusted, s.GRPCPort
			c.Include = s.Include
			if s.Version != "" {
				_, err := fmt.Sscanf(s.Version, "%d.%d.%d", &c.Build.Major, &c.Build.Minor, &c.Build.Patch)
				require.NoError(t, err)
			}
			r, err := render.New(c)
			require.NoError(t, err)
			g, err := r.Render(s.input())
			require.NoError(t, err)
			var out strings.Builder
			for _, f := range g.Files {
				fmt.Fprintf(&out, "==== %s\n%s", f.Name, f.Data)
			}
			golden := strings.TrimSuffix(name, ".yaml") + ".conf"
			if *update {
				require.NoError(t, os.WriteFile(golden, []byte(out.String()), 0o644))
			}
			want, err := os.ReadFile(golden)
			require.NoError(t, err)
			require.Equal(t, string(want), out.String())
			if s.Version == "" && !s.Include {
				accepted(t, g)
			}
		})
	}
}

func TestRender_ShuffledInputGivesTheSameBytes(t *testing.T) { // RTE-8
	in := many(t, 60, 3)
	r, err := render.New(config(t))
	require.NoError(t, err)
	first, err := r.Render(in)
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 5 {
		rng.Shuffle(len(in.Routes), func(i, j int) { in.Routes[i], in.Routes[j] = in.Routes[j], in.Routes[i] })
		rng.Shuffle(len(in.Services), func(i, j int) { in.Services[i], in.Services[j] = in.Services[j], in.Services[i] })
		for i := range in.Routes {
			slices.Reverse(in.Routes[i].Hosts)
		}
		again, err := r.Render(in)
		require.NoError(t, err)
		require.Equal(t, first, again)
	}
	in.User = []render.File{{Name: "user-http/a.conf", Data: []byte("# mine\n")}}
	own, err := r.Render(in)
	require.NoError(t, err)
	require.NotEqual(t, first.ID, own.ID)
	in.User[0].Name = "user-http/../nginx.conf"
	_, err = r.Render(in)
	require.Error(t, err)
}

// many makes routes with equal and with different settings.
func many(t testing.TB, workloads, copies int) render.Input {
	in := render.Input{Certs: map[string]string{}, Address: func(id placement.LinkID) (netip.Addr, bool) {
		var w, n int
		_, err := fmt.Sscanf(id.Placement.Workload+" "+id.Placement.Node, "w%d n%d", &w, &n)
		return netip.AddrFrom4([4]byte{127, 65 + byte(n), byte(w >> 8), byte(w)}), err == nil
	}}
	for w := range workloads {
		r := upstream.Route{
			Name: fmt.Sprintf("r%d", w), Workload: fmt.Sprintf("w%d", w), Port: 80, Created: uint64(w),
			Hosts: []string{fmt.Sprintf("w%d.example", w), fmt.Sprintf("www.w%d.example", w)},
		}
		if w%10 == 0 {
			r.TLS = &upstream.RouteTLS{Cert: "c"}
			in.Certs[r.Name] = "c"
		}
		in.Routes = append(in.Routes, r)
		s := upstream.Service{Workload: r.Workload, Port: 80}
		for n := range copies {
			if (w+n)%5 == 0 {
				s.Others = append(s.Others, link(r.Workload, fmt.Sprintf("n%d", n), 80))
			} else {
				s.Open = append(s.Open, link(r.Workload, fmt.Sprintf("n%d", n), 80))
			}
		}
		in.Services = append(in.Services, s)
	}
	return in
}

func TestRender_Large(t *testing.T) { // RTE-11: sizes are computed
	in := many(t, manyRoutes, 1)
	for i := range in.Routes {
		in.Routes[i].TLS = &upstream.RouteTLS{Cert: "c"}
		in.Certs[in.Routes[i].Name] = fmt.Sprintf("c%d", i)
	}
	label := strings.Repeat("a", 63)
	in.Routes[0].Hosts = append(in.Routes[0].Hosts, label+"."+label+"."+label+"."+strings.Repeat("b", 61))
	r, err := render.New(config(t))
	require.NoError(t, err)
	g, err := r.Render(in)
	require.NoError(t, err)
	accepted(t, g)
}
