package ingress_test

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/ingress"
	"github.com/opfield/availability/ingress/ingresstest"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// ownNginx is an nginx that the user runs, with a server of its own.
func ownNginx(e *env, extra string) (mainFile string, port uint16) {
	port = ingresstest.FreePort(e.t)
	mainFile = filepath.Join(e.dir, "own.conf")
	e.writeOwn(mainFile, port, extra)
	require.NoError(e.t, os.MkdirAll(e.config.Apply.Dir, 0o755))
	out, err := exec.Command("nginx", "-e", e.dir+"/own.log", "-c", mainFile).CombinedOutput()
	require.NoError(e.t, err, "%s", out)
	e.t.Cleanup(func() {
		text, err := os.ReadFile(filepath.Join(e.dir, "own.pid"))
		if err != nil {
			return
		}
		var pid int
		if _, err := fmt.Sscanf(string(text), "%d", &pid); err == nil && pid > 1 {
			_ = syscall.Kill(pid, syscall.SIGTERM)
		}
	})
	return mainFile, port
}

func (e *env) writeOwn(file string, port uint16, extra string) {
	user := ""
	if e.config.Render.User != "" {
		user = "user " + e.config.Render.User + ";"
	}
	text := fmt.Sprintf(`load_module %s/ngx_stream_module.so; %s
worker_processes 1; pid %s/own.pid; error_log %s/own.log notice;
events { worker_connections 512; }
http {
  access_log off; client_body_temp_path %[3]s/body; proxy_temp_path %[3]s/proxy;
  fastcgi_temp_path %[3]s/f; uwsgi_temp_path %[3]s/u; scgi_temp_path %[3]s/s;
  include %[5]s/current/*http.conf; %[6]s
  server { listen 127.0.0.1:%[7]d; location / { return 200 "own\n"; } }
}
stream { include %[5]s/current/*stream.conf; }
`, e.config.Render.Build.ModulesPath, user, e.dir, e.dir, e.config.Apply.Dir, extra, port)
	require.NoError(e.t, os.WriteFile(file, []byte(text), 0o644))
}

// RTE-7, RTE-9: with the user's own nginx the sidecar only brings files and
// asks for a reload; what the user has stays as it is.
func TestIngress_Include(t *testing.T) {
	e := newEnv(t, func(c *ingress.Config) {
		c.Render.Include, c.Render.OwnHashes = true, true
		dir := filepath.Dir(c.StateDir)
		c.Apply.PIDFile, c.Apply.MainFile, c.Apply.ErrorLog = dir+"/own.pid", dir+"/own.conf", dir+"/own.log"
	})
	mainFile, port := ownNginx(e, "")
	e.place("web", true, "a", "b")
	tcp := upstream.Route{Name: "tcp", Protocol: placement.ProtocolTCP, Listen: ingresstest.FreePort(t), Workload: "web", Port: 80}
	e.source.SetRoutes(t, route("web", "web.example", "web"), tcp)
	require.NoError(t, os.MkdirAll(e.config.Render.LogDir, 0o755))
	e.start()
	e.settled()
	require.Empty(t, e.ingress.Status().Reload.Error)
	own := func() bool {
		a, err := e.try(http.MethodGet, fmt.Sprintf("http://own.example:%d/", port), "")
		return err == nil && a.body == "own\n"
	}
	require.True(t, own())
	for _, method := range []string{"GET", "POST", "FOO"} {
		require.Equal(t, 200, e.do(method, e.url("web.example", "/"), "").StatusCode, method)
	}

	// The user breaks the main file: named, and the previous files come back.
	e.writeOwn(mainFile, port, "server { listen broken:; }")
	e.source.SetRoutes(t, route("web", "web.example", "web"), route("new", "new.example", "web"))
	e.within(10*time.Second, "named", func() bool { return strings.Contains(e.ingress.Status().Reload.Error, "own.conf") })
	require.Equal(t, 200, e.do("GET", e.url("web.example", "/"), "").StatusCode)
	require.Equal(t, 404, e.do("GET", e.url("new.example", "/"), "").StatusCode)

	e.writeOwn(mainFile, port, "")
	e.within(70*time.Second, "applied by a retry", func() bool {
		a, err := e.try("GET", e.url("new.example", "/"), "")
		return err == nil && a.StatusCode == 200
	})
	require.True(t, own())
}
