package render

import (
	"fmt"
	"net/netip"
	"regexp"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

// Config is what the operator decides about nginx. Every path is absolute.
type Config struct {
	Build Build
	// Include renders for an nginx that is not ours: no main file, no default
	// server, and the hash sizes only if OwnHashes is set.
	Include   bool
	OwnHashes bool

	RunDir    string // pid file and temporary files of our own nginx
	LogDir    string // access.log, stream.log, error.log
	SocketDir string // sockets that no client can reach
	CertDir   string // <id>.pem with chain and key, readable by nginx workers

	ClientCert, ClientKey, ClientCA string // the ingress identity, shown to nodes

	Addresses     []netip.Addr // listened on; IPv4 and IPv6
	HTTPPort      uint16
	HTTPSPort     uint16
	PlainGRPCPort uint16 // HTTP/2 without TLS; 0 = none
	Trusted       []netip.Prefix

	User            string // of the workers of our own nginx; "" = that of the master
	Workers         int    // 0 = one per processor
	Connections     int
	ShutdownTimeout time.Duration
	EndpointPort    uint16

	Templates map[string]string // override files of package templates by name
}

// DefaultConfig returns a Config that lacks Build and the paths.
func DefaultConfig() Config {
	return Config{
		Addresses:       []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()},
		HTTPPort:        80,
		HTTPSPort:       443,
		Connections:     16384,
		ShutdownTimeout: 5 * time.Minute,
		EndpointPort:    7443,
	}
}

var (
	pathPattern = regexp.MustCompile(`^/[A-Za-z0-9._/+@=-]+$`)
	userPattern = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)
	certPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{0,159}$`)
)

// Validate reports the first field that cannot be used.
func (c Config) Validate() error {
	for _, p := range []struct {
		name, value string
		optional    bool
	}{
		{"RunDir", c.RunDir, c.Include},
		{"LogDir", c.LogDir, false},
		{"SocketDir", c.SocketDir, false},
		{"CertDir", c.CertDir, false},
		{"ClientCert", c.ClientCert, false},
		{"ClientKey", c.ClientKey, false},
		{"ClientCA", c.ClientCA, false},
	} {
		if p.value == "" && p.optional {
			continue
		}
		if !pathPattern.MatchString(p.value) {
			return fmt.Errorf("%s: want an absolute path of A-Z, a-z, 0-9 and ._/+@=-", p.name)
		}
	}
	if len(c.SocketDir) > 80 {
		return fmt.Errorf("SocketDir: %d characters, at most 80 fit a unix socket's address", len(c.SocketDir))
	}
	if c.User != "" && !userPattern.MatchString(c.User) {
		return fmt.Errorf("User: want the name of a system user")
	}
	switch {
	case len(c.Addresses) == 0:
		return fmt.Errorf("Addresses: want at least one")
	case c.HTTPPort == 0 || c.HTTPSPort == 0 || c.EndpointPort == 0:
		return fmt.Errorf("HTTPPort, HTTPSPort, EndpointPort: want 1 to 65535")
	case c.HTTPPort == c.HTTPSPort:
		return fmt.Errorf("HTTPSPort: want another port than HTTPPort")
	case c.PlainGRPCPort != 0 && (c.PlainGRPCPort == c.HTTPPort || c.PlainGRPCPort == c.HTTPSPort):
		return fmt.Errorf("PlainGRPCPort: want another port than HTTPPort and HTTPSPort")
	case c.Connections < 64:
		return fmt.Errorf("Connections: want at least 64")
	case c.ShutdownTimeout < time.Second:
		return fmt.Errorf("ShutdownTimeout: want at least 1s")
	case len(c.Trusted) > 0 && !c.Build.RealIP:
		return fmt.Errorf("Trusted: this nginx is built without http_realip_module")
	}
	return nil
}

// Input is everything that a generation is made of.
type Input struct {
	Routes   []upstream.Route // normalised and accepted
	Services []upstream.Service
	Address  func(placement.LinkID) (netip.Addr, bool)
	// Certs names the file in CertDir of every route that has one.
	Certs map[string]string
	// Identity stands for the content of the identity's files, which nginx
	// reads when it loads a generation: a renewed one is a new generation.
	Identity string
	// User are the user's own files for our nginx, named UserHTTP or
	// UserStream + "/x.conf". They are copied as they are.
	User []File
}

// The folders of a generation for the user's own files.
const (
	UserHTTP   = "user-http"
	UserStream = "user-stream"
)

var identityPattern = regexp.MustCompile(`^[0-9a-f]{1,64}$`)

var userFilePattern = regexp.MustCompile(`^user-(http|stream)/[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}\.conf$`)

// File is one file of a generation.
type File struct {
	Name string
	Data []byte
}

// Generation is a rendered configuration. ID depends on the content alone.
type Generation struct {
	ID        string
	Files     []File
	Primaries []placement.LinkID
	Routes    []string // names, sorted
}
