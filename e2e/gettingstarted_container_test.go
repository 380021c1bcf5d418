package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/system"
)

// ingressImage builds what the guide's Dockerfile would: nginx, its stream
// module and the sidecar. No distribution is reachable from a test, so this
// machine's files are taken.
func ingressImage(t *testing.T, n *lab.Node) {
	t.Helper()
	root := n.Path("image")
	copyIn := func(file string) {
		to := filepath.Join(root, file)
		require.NoError(t, os.MkdirAll(filepath.Dir(to), 0o755))
		out, err := exec.Command("cp", "-rL", file, to).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	const nginx, module = "/usr/sbin/nginx", "/usr/lib/nginx/modules/ngx_stream_module.so"
	for _, file := range []string{nginx, module, "/etc/passwd", "/etc/group"} {
		copyIn(file)
	}
	out, err := exec.Command("ldd", nginx, module).Output()
	require.NoError(t, err)
	copied := map[string]bool{}
	for _, lib := range regexp.MustCompile(`(/\S+) \(0x`).FindAllStringSubmatch(string(out), -1) {
		if !copied[lib[1]] {
			copied[lib[1]] = true
			copyIn(lib[1])
		}
	}
	for _, dir := range []string{"tmp", "usr/local/bin", "run", "var/log/nginx", "var/lib/nginx"} {
		require.NoError(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	out, err = exec.Command("cp", n.Host.Path("opfield-ingress"), filepath.Join(root, "usr/local/bin/opfield-ingress")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	dockerfile := "FROM scratch\nCOPY image /\nENTRYPOINT [\"/usr/local/bin/opfield-ingress\"]\nCMD [\"run\"]\n"
	n.WriteFile("context/Dockerfile", dockerfile)
	require.NoError(t, os.Rename(root, n.Path("context", "image")))
	text, err := n.Run("env", "DOCKER_BUILDKIT=0", "docker", "-H", n.Socket(), "build", "-t", "opfield-ingress", n.Path("context"))
	require.NoError(t, err, text)
}

// The guide's commands for an nginx in a container, on a host with Docker.
func TestGettingStarted_NginxInContainer(t *testing.T) {
	blocks, _ := readGuide(t)
	i := slices.IndexFunc(blocks, func(b block) bool { return slices.Equal(b.hosts, []string{"container"}) })
	require.GreaterOrEqual(t, i, 0)
	env := lab.New(t)
	s := system.Start(t, env, system.Config{Relays: 1, Nodes: 1})
	s.Nodes[0].RunApp(lab.App{Workload: "web"})
	s.MustCLI("route", "add", "web", "--host", "web.example", "--workload", "web", "--port", "8080")
	s.AwaitLinks(guideWithin, "open", "web.node-1/8080")

	host := env.Node("container")
	program, err := os.ReadFile(env.Binary("./cmd/opfield-ingress"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(host.Path("opfield-ingress"), program, 0o755))
	ingressImage(t, host)
	token := s.MustCLI("token", "create", "--role", "ingress", "--id", "edge-1")
	lines := strings.Split(strings.TrimSpace(token), "\n")
	host.WriteFile("edge-1.token", lines[len(lines)-1])
	for command := range strings.Lines(strings.ReplaceAll(blocks[i].text, "\\\n", " ")) {
		for from, to := range map[string]string{
			"docker ": "docker -H " + host.Socket() + " ", "ctrl.example:8480": s.Controller.HostPort(8480),
			"-v /": "-v " + host.Path("volumes") + "/",
		} {
			command = strings.ReplaceAll(command, from, to)
		}
		out, err := host.Run("sh", "-c", command)
		require.NoError(t, err, out)
	}
	answers := func() bool {
		status, _ := system.GetHost(s.Client(), host.HostPort(80), "web.example", "/ok")
		return status == 200
	}
	defer func() {
		if t.Failed() {
			out, _ := host.Run("docker", "-H", host.Socket(), "logs", "opfield-ingress")
			t.Log(out)
		}
	}()
	env.Await(guideWithin, "nginx in the container answers", answers)
	for _, verb := range []string{"stop", "start"} {
		out, err := host.Run("docker", "-H", host.Socket(), verb, "opfield-ingress")
		require.NoError(t, err, out)
	}
	env.Await(guideWithin, "it answers again", answers)
}
