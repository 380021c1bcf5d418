package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/load"
	"github.com/opfield/availability/e2e/system"
)

const (
	guidePath = "../docs/getting-started.md"

	configurationPath = "../docs/configuration.md"
	guideWithin       = 25 * time.Second // for a command that looks until it sees what it should
	buildHost         = "build"          // the machine with Go: this one
	tcpListen         = 9000             // of the guide's TCP route
)

// guideHosts are the machines of the guide and the names they are known by.
func guideHosts() []string { return []string{"ctrl", "edge", "node-1", "node-2", "own", "client"} }

// block is a marked code block of the guide: commands, or the content of a
// file, for some hosts.
type block struct {
	section string
	hosts   []string
	each    bool // the first host's name in the text stands for the host's own
	file    string
	text    string
	line    int
}

// readGuide returns the marked blocks in the order of the text, and the ports
// that the firewall table opens on each kind of machine.
func readGuide(t *testing.T) (blocks []block, ports map[string][]uint16) {
	t.Helper()
	text, err := os.ReadFile(guidePath)
	require.NoError(t, err)
	ports = map[string][]uint16{}
	row := regexp.MustCompile(`^\| (controller|relay|ingress node|Docker node) \| ([^|]*) \|`)
	number := regexp.MustCompile(`[0-9]+`)
	var section string
	var in *block
	fenced := false
	for i, line := range strings.Split(string(text), "\n") {
		switch info, fence := strings.CutPrefix(line, "```"); {
		case fence && fenced:
			if in != nil && len(in.hosts) > 0 {
				blocks = append(blocks, *in)
			}
			in, fenced = nil, false
		case fence:
			in, fenced = &block{section: section, line: i + 1}, true
			for _, word := range strings.Fields(info) {
				key, value, _ := strings.Cut(word, "=")
				switch key {
				case "on", "each":
					in.hosts, in.each = strings.Split(value, ","), key == "each"
				case "file":
					in.file = value
				}
			}
		case fenced:
			in.text += line + "\n"
		case strings.HasPrefix(line, "#"):
			section = strings.TrimLeft(line, "# ")
		default:
			if m := row.FindStringSubmatch(line); m != nil && section == "Ports and firewall" {
				for _, p := range number.FindAllString(m[2], -1) {
					n, err := strconv.ParseUint(p, 10, 16)
					require.NoError(t, err)
					ports[m[1]] = append(ports[m[1]], uint16(n))
				}
			}
		}
	}
	require.False(t, fenced, "a code block does not end")
	return blocks, ports
}

// guide runs the blocks on hosts with a file system of their own.
type guide struct {
	t       *testing.T
	env     *lab.Env
	hosts   map[string]*lab.Host
	daemons map[string]*lab.Process // host/unit
}

func newGuide(t *testing.T, ports map[string][]uint16) *guide {
	t.Helper()
	g := &guide{t: t, env: lab.New(t), hosts: map[string]*lab.Host{}, daemons: map[string]*lab.Process{}}
	for _, name := range guideHosts() {
		g.hosts[name] = g.env.Host(name)
	}
	for _, n := range g.env.Nodes("node-1", "node-2") {
		g.hosts[n.Name()] = n.Host
	}
	for name, h := range g.hosts {
		g.disk(name, h)
		switch name {
		case "ctrl":
			h.AllowOnly(slices.Concat(ports["controller"], ports["relay"])...)
		case "edge", "own":
			h.AllowOnly(append(slices.Clone(ports["ingress node"]), tcpListen)...)
		default:
			h.AllowOnly(ports["Docker node"]...) // RLY-1: nothing dials a node
		}
	}
	return g
}

// disk makes what a fresh machine has in the folders that the guide writes to.
func (g *guide) disk(name string, h *lab.Host) {
	g.t.Helper()
	for _, dir := range []string{"lib/nginx", "log/nginx", "run/lock", "bin", "root"} {
		require.NoError(g.t, os.MkdirAll(h.Path(dir), 0o755))
	}
	out, err := exec.Command("cp", "-a", "/etc", h.Path("etc")).CombinedOutput()
	require.NoError(g.t, err, "%s", out)
	hosts := "127.0.0.1 localhost\n"
	for other, o := range g.hosts {
		hosts += fmt.Sprintf("%s %s.example\n", o.Addr(), other)
	}
	hosts += fmt.Sprintf("%s shop.example admin.shop.example upload.shop.example\n", g.hosts["edge"].Addr())
	require.NoError(g.t, os.WriteFile(h.Path("etc", "hosts"), []byte(hosts), 0o644))
	if strings.HasPrefix(name, "node-") {
		require.NoError(g.t, os.Symlink(h.Path("docker.sock"), h.Path("run", "docker.sock")))
		// Where the machine's own client is hidden by the host's folder.
		if docker, err := exec.LookPath("docker"); err == nil && filepath.Dir(docker) == "/usr/local/bin" {
			g.copyFile(docker, h.Path("bin", "docker"))
		}
	}
	h.WriteFile("enter", fmt.Sprintf(`set -e
mount --bind %[1]s/etc /etc
mount --bind %[1]s/lib /var/lib
mount --bind %[1]s/log /var/log
mount --bind %[1]s/bin /usr/local/bin
mount --bind %[1]s/root /root
mount --bind %[1]s/run /run
cd /root
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec "$@"
`, h.Dir()))
}

func (g *guide) copyFile(from, to string) {
	g.t.Helper()
	in, err := os.Open(from)
	require.NoError(g.t, err)
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	require.NoError(g.t, err)
	defer out.Close()
	_, err = io.Copy(out, in)
	require.NoError(g.t, err)
}

// entered is a command line inside the host's network and file system.
func entered(h *lab.Host, argv ...string) []string {
	return append([]string{"unshare", "--mount", "sh", h.Path("enter")}, argv...)
}

// path returns where a path of the host lies on this machine.
func (g *guide) path(h *lab.Host, name string) string {
	for prefix, dir := range map[string]string{"/etc/": "etc", "/run/": "run", "/var/lib/": "lib", "/var/log/": "log"} {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			return h.Path(dir, rest)
		}
	}
	require.False(g.t, filepath.IsAbs(name), "the test has no place for %s", name)
	return h.Path("root", name)
}

// run follows one block.
func (g *guide) run(b block) {
	g.t.Helper()
	if slices.Equal(b.hosts, []string{buildHost}) {
		g.build(b)
		return
	}
	for _, name := range b.hosts {
		h := g.hosts[name]
		require.NotNil(g.t, h, "%s:%d: no host %s", guidePath, b.line, name)
		text := b.text
		if b.each {
			text = strings.ReplaceAll(text, b.hosts[0], name)
		}
		if b.file != "" {
			file := g.path(h, b.file)
			require.NoError(g.t, os.MkdirAll(filepath.Dir(file), 0o755))
			require.NoError(g.t, os.WriteFile(file, []byte(text), 0o644))
			continue
		}
		for command := range strings.Lines(strings.ReplaceAll(text, "\\\n", " ")) {
			if command = strings.TrimSpace(command); command != "" && !strings.HasPrefix(command, "#") {
				g.command(b, name, h, command)
			}
		}
	}
}

// build runs the commands in the source's folder and brings the programs to
// every host.
func (g *guide) build(b block) {
	g.t.Helper()
	for command := range strings.Lines(b.text) {
		cmd := exec.Command("sh", "-c", command)
		cmd.Dir = ".."
		out, err := cmd.CombinedOutput()
		require.NoError(g.t, err, "%s: %s", command, out)
	}
	programs, err := filepath.Glob("../bin/opfield*")
	require.NoError(g.t, err)
	require.NotEmpty(g.t, programs)
	for _, p := range programs {
		from, err := filepath.Abs(p)
		require.NoError(g.t, err)
		for _, h := range g.hosts {
			require.NoError(g.t, os.Symlink(from, h.Path("root", filepath.Base(p))))
		}
	}
}

func (g *guide) command(b block, name string, h *lab.Host, command string) {
	g.t.Helper()
	words := strings.Fields(command)
	switch words[0] {
	case "systemctl":
		g.systemctl(name, h, words[1:])
		return
	case "scp":
		to, _, ok := strings.Cut(strings.TrimPrefix(words[2], "root@"), ".example:")
		require.True(g.t, ok && g.hosts[to] != nil, command)
		g.copyFile(g.path(h, words[1]), g.path(g.hosts[to], words[1]))
		return
	}
	run := func() error {
		out, err := h.Run(entered(h, "sh", "-c", command)...)
		if err == nil {
			g.t.Logf("%s# %s\n%s", name, command, out)
		}
		return err
	}
	err := run()
	// What looks may have to look again; what changes something is run once.
	looks := strings.HasPrefix(command, "curl ") || strings.HasPrefix(command, "opfield status") || strings.HasPrefix(command, "opfield-ingress status")
	for start := time.Now(); err != nil && looks && time.Since(start) < guideWithin; err = run() {
		time.Sleep(200 * time.Millisecond)
	}
	require.NoError(g.t, err, "%s:%d", guidePath, b.line)
}

// systemctl does what systemd would do with the units of the guide.
func (g *guide) systemctl(name string, h *lab.Host, words []string) {
	g.t.Helper()
	words = slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == "--now" })
	if words[0] == "daemon-reload" || words[1] == "nginx" {
		return // of the distribution: it was never started here
	}
	key := name + "/" + words[1]
	unit := g.unit(h, words[1])
	run := func(line string) {
		out, err := h.Run(entered(h, strings.Fields(line)...)...)
		require.NoError(g.t, err, "%s: %s", line, out)
	}
	start := func() {
		g.daemons[key] = h.Start(words[1], entered(h, strings.Fields(unit["ExecStart"])...)...)
	}
	switch words[0] {
	case "enable":
		start()
	case "reload":
		before, _ := os.ReadFile(g.path(h, unit["PIDFile"]))
		run(unit["ExecReload"])
		g.env.Await(guideWithin, key+" has a successor", func() bool {
			now, err := os.ReadFile(g.path(h, unit["PIDFile"]))
			return err == nil && string(now) != string(before)
		})
		if words[1] == "opfield-ingress" {
			g.settled(h)
		}
	case "restart":
		if stop := unit["ExecStop"]; stop != "" {
			run(stop)
		}
		require.True(g.t, g.daemons[key].Stop(guideWithin), "%s did not end by itself", key)
		start()
	default:
		g.t.Fatalf("systemctl %s: the test does not know it", words[0])
	}
}

// settled waits until a new sidecar has compared nginx with what it knows.
func (g *guide) settled(h *lab.Host) {
	g.t.Helper()
	g.env.Await(guideWithin, "the sidecar of "+h.Name()+" is up to date", func() bool {
		var st system.IngressStatus
		body, err := system.Get(h, "http://127.0.0.1:9102/status")
		return err == nil && json.Unmarshal(body, &st) == nil && st.Reload.Result != "" && !st.Reload.Pending
	})
}

// unit reads a unit file.
func (g *guide) unit(h *lab.Host, name string) map[string]string {
	g.t.Helper()
	file := "/etc/systemd/system/" + name + ".service"
	text, err := os.ReadFile(g.path(h, file))
	require.NoError(g.t, err)
	found := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			found[key] = value
		}
	}
	return found
}

// pair makes a CA and a certificate of it for the hosts, as PEM.
func pair(t *testing.T, hosts ...string) (ca, cert, key []byte) {
	t.Helper()
	make := func(tmpl, parent *x509.Certificate, signer *ecdsa.PrivateKey) ([]byte, *ecdsa.PrivateKey) {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		require.NoError(t, err)
		if signer == nil {
			signer = k
		}
		der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, &k.PublicKey, signer)
		require.NoError(t, err)
		return der, k
	}
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "guide CA"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	rootDER, rootKey := make(root, root, nil)
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: hosts[0]}, DNSNames: hosts,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	leafDER, leafKey := make(leaf, root, rootKey)
	keyDER, err := x509.MarshalPKCS8PrivateKey(leafKey)
	require.NoError(t, err)
	encode := func(kind string, der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}) }
	return encode("CERTIFICATE", rootDER), encode("CERTIFICATE", leafDER), encode("PRIVATE KEY", keyDER)
}

// bring is what the reader of the guide has beside it: certificates, an image
// and, on the host "own", an nginx that runs.
func (g *guide) bring() {
	ca, cert, key := pair(g.t, "shop.example", "admin.shop.example")
	for file, content := range map[string][]byte{
		g.path(g.hosts["ctrl"], "fullchain.pem"): cert, g.path(g.hosts["ctrl"], "privkey.pem"): key, g.path(g.hosts["client"], "ca.pem"): ca,
		g.path(g.hosts["edge"], "/etc/ssl/shop/fullchain.pem"): cert, g.path(g.hosts["edge"], "/etc/ssl/shop/privkey.pem"): key,
	} {
		require.NoError(g.t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(g.t, os.WriteFile(file, content, 0o600))
	}
	for _, name := range []string{"node-1", "node-2"} {
		h := g.hosts[name]
		out, err := h.Run(entered(h, "docker", "tag", lab.AppImage, "registry.example/shop:1.4")...)
		require.NoError(g.t, err, out)
	}
	own := g.hosts["own"]
	out, err := own.Run(entered(own, "nginx")...)
	require.NoError(g.t, err, out)
}

// reference compares docs/configuration.md with what runs: metrics, fields of
// the access log, and how that is rotated.
func (g *guide) reference() {
	g.t.Helper()
	text, err := os.ReadFile(configurationPath)
	require.NoError(g.t, err)
	documented := func(what string) {
		require.Contains(g.t, string(text), "`"+what+"`", "%s does not name it", configurationPath)
	}
	name := regexp.MustCompile(`(?m)^# TYPE (opfield_[a-z_]+) `)
	for _, at := range []struct {
		host string
		port uint16
	}{{"ctrl", 9100}, {"ctrl", 9101}, {"edge", 9102}, {"node-1", 9103}} {
		body, err := system.Get(g.hosts[at.host], fmt.Sprintf("http://127.0.0.1:%d/metrics", at.port))
		require.NoError(g.t, err)
		found := name.FindAllStringSubmatch(string(body), -1)
		require.NotEmpty(g.t, found)
		for _, m := range found {
			documented(m[1])
		}
	}
	edge := g.hosts["edge"]
	logs := g.path(edge, "/var/log/opfield-ingress/access.log")
	line, err := os.ReadFile(logs)
	require.NoError(g.t, err)
	for one := range strings.Lines(string(line)) {
		fields := map[string]string{}
		require.NoError(g.t, json.Unmarshal([]byte(one), &fields), one)
		for field := range fields {
			documented(field)
		}
		if fields["route"] == "plain" {
			g.t.Logf("%s", one)
			break
		}
	}
	require.NoError(g.t, os.Rename(logs, logs+".1"))
	g.run(block{hosts: []string{"edge"}, text: "/usr/bin/pkill -USR1 -F /run/opfield-ingress/nginx.pid\n"})
	g.env.Await(guideWithin, "nginx writes to a new log", func() bool {
		system.GetHost(g.hosts["client"], edge.HostPort(80), "plain.example", "/")
		info, err := os.Stat(logs)
		return err == nil && info.Size() > 0
	})
}

// Every flag of every program is described, with its default.
func TestGettingStarted_EveryFlagIsDescribed(t *testing.T) {
	text, err := os.ReadFile(configurationPath)
	require.NoError(t, err)
	flag := regexp.MustCompile(`(?m)^ +(?:-[a-z], +)?(?:    )?--([a-z][a-z-]*)`)
	env := lab.New(t)
	for program, commands := range map[string][]string{
		"opfield":       {"serve", "join", "token create", "route add", "route apply", "cert add", "status", "workloads", "completion", "events"},
		"opfield-relay": {"join", "run"}, "opfield-node": {"join", "run"}, "opfield-ingress": {"join", "run", "status"},
	} {
		binary := env.Binary("./cmd/" + program)
		for _, c := range commands {
			out, err := exec.Command(binary, append(strings.Fields(c), "--help")...).CombinedOutput()
			require.NoError(t, err, "%s", out)
			found := flag.FindAllStringSubmatch(string(out), -1)
			require.NotEmpty(t, found)
			for _, m := range found {
				if m[1] != "help" && m[1] != "version" {
					require.Contains(t, string(text), "`--"+m[1]+"`", "%s %s --%s", program, c, m[1])
				}
			}
		}
	}
}

// The guide is followed on hosts where only the ports of its table are open.
func TestGettingStarted(t *testing.T) {
	blocks, ports := readGuide(t)
	require.NotEmpty(t, blocks)
	require.Empty(t, ports["Docker node"])
	g := newGuide(t, ports)
	g.bring()
	edge, own, client := g.hosts["edge"], g.hosts["own"], g.hosts["client"]
	var upgrade *load.Run
	var section string
	for _, b := range blocks {
		if slices.Equal(b.hosts, []string{"container"}) {
			continue // TestGettingStarted_NginxInContainer
		}
		if b.section != section {
			section = b.section
			t.Logf("== %s", section)
			switch section {
			case "An nginx that exists already":
				g.run(block{hosts: []string{"ctrl"}, text: "opfield token create --role ingress --id edge-2 >edge-2.token\nscp edge-2.token root@own.example:\n"})
				g.run(block{hosts: []string{"own"}, text: "install -m 755 opfield-ingress /usr/local/bin/\n"})
			case "Upgrades and restarts":
				g.run(block{hosts: []string{"ctrl"}, text: "opfield route add plain --host plain.example --workload shop --port 8080\n"})
				for _, h := range []*lab.Host{edge, own} {
					good := 0 // old workers of nginx answer for a moment too
					g.env.Await(guideWithin, h.Name()+" serves the route", func() bool {
						status, _ := system.GetHost(client, h.HostPort(80), "plain.example", "/")
						good++
						if status != 200 {
							good = 0
						}
						return good == 50
					})
				}
				upgrade = load.Start(load.Config{
					Dial: client.DialContext, Address: edge.HostPort(80), Host: "plain.example", Duration: 10 * time.Minute,
					Streams: []load.Stream{{Name: "get", Method: "GET", Path: "/ok", Rate: 20}, {Name: "get-fresh", Method: "GET", Path: "/ok", Rate: 20, Fresh: true}},
				})
			case "Troubleshooting":
				time.Sleep(2 * time.Second) // what the restarts stirred up must settle under load
				report := upgrade.Stop()
				t.Log("\n" + report.String())
				require.Empty(t, report.Failed(""), report.Describe(report.Failed(""), 10))
			}
		}
		g.run(b)
	}
	require.Equal(t, "Troubleshooting", section)

	g.reference()

	// What the guide says in words.
	status, body := system.GetHost(client, own.HostPort(80), "other.example", "/")
	require.Equal(t, 200, status, "the nginx that existed serves what it served: %s", body)
	status, _ = system.GetHost(client, edge.HostPort(80), "other.example", "/")
	require.Equal(t, 404, status)
	g.run(block{hosts: []string{"client"}, text: "curl --silent --output /dev/null --write-out '%{http_code}' http://shop.example/ | grep 308\n"})
	g.run(block{hosts: []string{"client"}, text: "curl --fail --silent --show-error --cacert ca.pem https://admin.shop.example/\n"})
	conn, err := client.DialContext(t.Context(), "tcp", edge.HostPort(tcpListen))
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(guideWithin)))
	_, err = io.WriteString(conn, "hello\n")
	require.NoError(t, err)
	answer := make([]byte, 6)
	_, err = io.ReadFull(conn, answer)
	require.NoError(t, err)
	require.Equal(t, "hello\n", string(answer))

	// The commands that the guide names between the lines.
	g.run(block{hosts: []string{"ctrl"}, text: "opfield identity list\nopfield nodes list\nopfield nats config\nopfield identity revoke node/node-2\n"})
	g.env.Await(guideWithin, "the links of a revoked node are not open", func() bool {
		var st system.IngressStatus
		body, err := system.Get(edge, "http://127.0.0.1:9102/status")
		return err == nil && json.Unmarshal(body, &st) == nil && !slices.ContainsFunc(st.Links, func(l system.Link) bool {
			return strings.HasPrefix(l.Link, "shop.node-2/") && l.State == "open"
		})
	})
	g.run(block{hosts: []string{"client"}, text: "curl --fail --silent --show-error --cacert ca.pem https://shop.example/\n"})
}
