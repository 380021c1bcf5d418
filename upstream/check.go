package upstream

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/idna"

	"github.com/opfield/availability/placement"
)

// Everything that may reach an nginx file passes one of these first. None
// of them admits a character that nginx, a regular expression in quotes or
// a shell would give a meaning to, except '.', which is escaped where it
// would have one.
var (
	hostLabel   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	pathPattern = regexp.MustCompile(`^/[A-Za-z0-9._~/-]*$`)
	filePattern = regexp.MustCompile(`^/[A-Za-z0-9._/+=-]+$`)
	certPattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,126}[a-z0-9])?$`)
)

// Check returns Problems with everything that is wrong with the route, or nil.
func (r Route) Check() error {
	_, err := r.Normalised()
	return err
}

// Normalised returns the route as the rest of the system uses it: hosts in
// lower case, as punycode, without a trailing dot, sorted, each once; path
// and protocol filled in. The error is Problems and lists all of them.
func (r Route) Normalised() (Route, error) {
	var ps Problems
	add := func(code Code, field, format string, args ...any) {
		ps = append(ps, Problem{Code: code, Field: field, Message: fmt.Sprintf(format, args...)})
	}
	name := func(code Code, field, value string) {
		if placement.CheckName(value) != nil {
			add(code, field, "want 1 to %d characters a-z, 0-9 and '-', beginning and ending with a letter or digit; choose such a name", placement.MaxNameLength)
		}
	}
	name(CodeName, "name", r.Name)
	if r.Protocol == "" {
		r.Protocol = placement.ProtocolHTTP
	}
	switch r.Protocol {
	case placement.ProtocolHTTP, placement.ProtocolGRPC:
		r.checkHTTP(add)
	case placement.ProtocolTCP:
		r.checkTCP(add)
	default:
		add(CodeProtocol, "protocol", "want http, grpc or tcp; set one of them")
	}
	name(CodeWorkload, "workload", r.Workload)
	if r.Port == 0 {
		add(CodePort, "port", "want 1 to 65535; set the port of the workload's application")
	}
	r.Settings.check(add)
	if len(ps) > 0 {
		return r, ps
	}
	return r, nil
}

// problemFunc collects one problem.
type problemFunc func(code Code, field, format string, args ...any)

func (r *Route) checkHTTP(add problemFunc) {
	if len(r.Hosts) == 0 {
		add(CodeHost, "hosts", "want at least one host name; add the name that clients use")
	}
	if len(r.Hosts) > MaxHosts {
		add(CodeHost, "hosts", "%d hosts, at most %d are allowed; split the route", len(r.Hosts), MaxHosts)
		return
	}
	hosts := make([]string, 0, len(r.Hosts))
	for i, h := range r.Hosts {
		n, err := NormaliseHost(h)
		if err != nil {
			add(CodeHost, fmt.Sprintf("hosts[%d]", i), "%v", err)
			continue
		}
		hosts = append(hosts, n)
	}
	slices.Sort(hosts)
	r.Hosts = slices.Compact(hosts)
	if r.Path == "" {
		r.Path = DefaultPath
	}
	if err := checkPath(r.Path); err != nil {
		add(CodePath, "path", "%v", err)
	} else if r.Path != "/" {
		r.Path = strings.TrimSuffix(r.Path, "/")
	}
	if r.Listen != 0 {
		add(CodeListen, "listen", "only TCP routes listen on an own port; remove it or set protocol to tcp")
	}
	if r.TLS != nil {
		t := *r.TLS
		r.TLS = &t
		r.TLS.check(add)
	}
}

func (r *Route) checkTCP(add problemFunc) {
	if len(r.Hosts) > 0 {
		add(CodeHost, "hosts", "a TCP route has no hosts; remove them or set protocol to http")
	}
	if r.Path != "" {
		add(CodePath, "path", "a TCP route has no path; remove it or set protocol to http")
	}
	if r.Listen == 0 {
		add(CodeListen, "listen", "want 1 to 65535; set the port of the ingress node that clients connect to")
	}
	if r.TLS != nil {
		add(CodeTLS, "tls", "a TCP route passes TLS on untouched; remove it, or set protocol to http")
	}
}

func (t *RouteTLS) check(add problemFunc) {
	files := t.CertFile != "" || t.KeyFile != ""
	if (t.Cert != "") == files {
		add(CodeTLS, "tls", "want either cert or both certFile and keyFile; keep one of the two")
		return
	}
	if !files {
		if !certPattern.MatchString(t.Cert) || strings.Contains(t.Cert, "..") {
			add(CodeTLS, "tls.cert", "want the name of a certificate: 1 to 128 characters a-z, 0-9, '-' and '.'; see the list of certificates")
		}
		return
	}
	for _, f := range []struct{ field, value string }{{"tls.certFile", t.CertFile}, {"tls.keyFile", t.KeyFile}} {
		if len(f.value) > MaxFileLength || !filePattern.MatchString(f.value) || hasDotSegment(f.value) {
			add(CodeTLS, f.field, "want an absolute path of at most %d characters A-Z, a-z, 0-9 and ._/+=- without '..'; move or link the file to such a path", MaxFileLength)
		}
	}
}

func (s RouteSettings) check(add problemFunc) {
	if s.MaxBodyBytes > MaxBodyBytes {
		add(CodeSettings, "settings.maxBodyBytes", "want at most %d; use 0 for no limit", uint64(MaxBodyBytes))
	}
	for _, d := range []struct {
		field string
		value Duration
	}{
		{"settings.readTimeout", s.ReadTimeout},
		{"settings.sendTimeout", s.SendTimeout},
		{"settings.idleTimeout", s.IdleTimeout},
	} {
		if d.value != 0 && (d.value < Duration(time.Millisecond) || d.value > MaxTimeout) {
			add(CodeSettings, d.field, "want 1ms to %s; use 0 for the default of %s", MaxTimeout, DefaultTimeout)
		}
	}
	if s.BufferKB != 0 && (s.BufferKB < MinBufferKB || s.BufferKB > MaxBufferKB) {
		add(CodeSettings, "settings.bufferKB", "want %d to %d; use 0 for the default of %d", MinBufferKB, MaxBufferKB, DefaultBufferKB)
	}
}

// NormaliseHost returns the host name as it is compared and rendered: lower
// case, punycode, no trailing dot. A leading "*." label is kept.
func NormaliseHost(host string) (string, error) {
	const hint = "want a host name like example.com or *.example.com"
	if len(host) > 1024 {
		return "", fmt.Errorf("%s: %d bytes long; a host name has at most 253 characters", hint, len(host))
	}
	name, wildcard := strings.CutPrefix(host, "*.")
	name = strings.TrimSuffix(name, ".")
	ascii, err := idna.Lookup.ToASCII(name)
	if err != nil {
		return "", fmt.Errorf("%s, letters of any language, digits and '-' only; correct the name", hint)
	}
	ascii = strings.ToLower(strings.TrimSuffix(ascii, "."))
	for label := range strings.SplitSeq(ascii, ".") {
		if !hostLabel.MatchString(label) {
			return "", fmt.Errorf("%s, every label 1 to 63 letters, digits and '-'; correct the name", hint)
		}
	}
	if wildcard {
		ascii = "*." + ascii
	}
	if len(ascii) > 253 {
		return "", fmt.Errorf("%s: %d characters long, at most 253 are allowed; shorten the name", hint, len(ascii))
	}
	return ascii, nil
}

func checkPath(path string) error {
	switch {
	case len(path) > MaxPathLength:
		return fmt.Errorf("want a path prefix of at most %d characters; shorten it", MaxPathLength)
	case !pathPattern.MatchString(path):
		return fmt.Errorf("want a path prefix that begins with '/' and has only A-Z, a-z, 0-9 and ._~/-; correct it")
	case hasDotSegment(path), strings.Contains(path, "//"):
		return fmt.Errorf("want a path prefix without '.', '..' or empty segments; write it resolved")
	}
	return nil
}

func hasDotSegment(path string) bool {
	for s := range strings.SplitSeq(path, "/") {
		if s == "." || s == ".." {
			return true
		}
	}
	return false
}
