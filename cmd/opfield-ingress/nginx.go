package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"time"

	"github.com/opfield/availability/cmd/internal/daemon"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/ingress"
	"github.com/opfield/availability/ingress/apply"
	"github.com/opfield/availability/ingress/endpoint"
	"github.com/opfield/availability/ingress/render"
)

// nginxFlags say which nginx is driven and how.
type nginxFlags struct {
	Nginx           string         `help:"nginx program." default:"/usr/sbin/nginx" type:"path"`
	RunDir          string         `help:"Folder of sockets and pid files." default:"/run/opfield-ingress" type:"path"`
	LogDir          string         `help:"Folder of nginx's logs." default:"/var/log/opfield-ingress" type:"path"`
	Address         []netip.Addr   `help:"Addresses that nginx listens on; default: all." placeholder:"IP"`
	HTTPPort        uint16         `name:"http-port" help:"Port for HTTP." default:"80"`
	HTTPSPort       uint16         `name:"https-port" help:"Port for HTTPS." default:"443"`
	PlainGRPCPort   uint16         `name:"plain-grpc-port" help:"Port for gRPC without TLS; 0: none." default:"0"`
	EndpointPort    uint16         `help:"Port of the link endpoints on the loopback device." default:"7443"`
	TrustedProxy    []netip.Prefix `help:"Networks of proxies in front, whose X-Forwarded-For counts." placeholder:"CIDR"`
	User            string         `help:"User of nginx's workers." default:"www-data"`
	Workers         int            `help:"nginx workers; 0: one per processor." default:"0"`
	Connections     int            `help:"Connections per worker." default:"16384"`
	ShutdownTimeout time.Duration  `help:"How long old nginx workers finish their requests." default:"5m"`
	TemplateDir     string         `help:"Folder with templates that replace ours." type:"path"`
	UserHTTP        string         `name:"user-http" help:"Folder with your own *.conf for http{} of our nginx." type:"path"`
	UserStream      string         `name:"user-stream" help:"Folder with your own *.conf for stream{} of our nginx." type:"path"`

	Include       bool     `help:"Drive an nginx that exists already: its main file includes STATE-DIR/nginx/current/http.conf and stream.conf."`
	NginxPIDFile  string   `name:"nginx-pid-file" help:"With --include: pid file of that nginx." type:"path"`
	NginxMainFile string   `name:"nginx-main-file" help:"With --include: its main file, if it is not the built-in one." type:"path"`
	NginxErrorLog string   `name:"nginx-error-log" help:"With --include: its error log, read for the reason of a refused reload." type:"path"`
	ReloadCommand []string `help:"With --include: command that reloads it, instead of a signal." placeholder:"WORD"`
	OwnHashes     bool     `help:"With --include: also set the sizes of nginx's hash tables."`
}

// ingressConfig asks nginx what it is and puts the configuration together.
func (c *runCmd) ingressConfig(id *identity.Identity) (ingress.Config, error) {
	if c.Include && c.NginxPIDFile == "" {
		return ingress.Config{}, daemon.UsageError("--nginx-pid-file: want the pid file of your nginx, because of --include")
	}
	build, err := nginxBuild(c.Nginx)
	if err != nil {
		return ingress.Config{}, err
	}
	uid := -1
	worker := ""
	if os.Geteuid() == 0 {
		u, err := user.Lookup(c.User)
		if err != nil {
			return ingress.Config{}, daemon.UsageError(fmt.Sprintf("--user: %v; name the user of nginx's workers", err))
		}
		if uid, err = strconv.Atoi(u.Uid); err != nil {
			return ingress.Config{}, daemon.UsageError(fmt.Sprintf("--user: uid %q is no number", u.Uid))
		}
		worker = c.User
	}
	r := render.DefaultConfig()
	r.Build, r.Include, r.OwnHashes = build, c.Include, c.OwnHashes
	r.RunDir, r.LogDir, r.SocketDir = c.RunDir, c.LogDir, filepath.Join(c.RunDir, "sockets")
	r.CertDir = filepath.Join(c.StateDir, "certs")
	r.ClientCert, r.ClientKey, r.ClientCA = id.CertFile(), id.KeyFile(), id.CAFile()
	if len(c.Address) > 0 {
		r.Addresses = c.Address
	}
	r.HTTPPort, r.HTTPSPort, r.PlainGRPCPort, r.EndpointPort = c.HTTPPort, c.HTTPSPort, c.PlainGRPCPort, c.EndpointPort
	r.Trusted, r.User, r.Workers, r.Connections, r.ShutdownTimeout = c.TrustedProxy, worker, c.Workers, c.Connections, c.ShutdownTimeout
	if c.EndpointPort == 0 {
		r.EndpointPort = endpoint.DefaultPort
	}
	return ingress.Config{
		StateDir: c.StateDir, Render: r, WorkerUID: uid,
		TemplateDir: c.TemplateDir, UserHTTP: c.UserHTTP, UserStream: c.UserStream,
		Apply: apply.Config{
			Binary: c.Nginx, Dir: filepath.Join(c.StateDir, "nginx"),
			MainFile: c.NginxMainFile, PIDFile: c.NginxPIDFile, ErrorLog: c.NginxErrorLog, ReloadCommand: c.ReloadCommand,
		},
	}, nil
}

func nginxBuild(program string) (render.Build, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, program, "-V").CombinedOutput()
	if err != nil {
		return render.Build{}, fmt.Errorf("--nginx: run %s -V (is nginx installed? Debian: apt-get install nginx libnginx-mod-stream): %w", program, err)
	}
	return render.ParseBuild(string(out))
}
