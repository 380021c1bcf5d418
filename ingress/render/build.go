package render

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// ErrBuild is the cause of every error about an nginx that cannot be used.
var ErrBuild = errors.New("unusable nginx")

// Build is what `nginx -V` says about an nginx binary.
type Build struct {
	Major, Minor, Patch int
	HTTP2               bool
	RealIP              bool
	Stream              bool
	StreamDynamic       bool // the stream module is a file to load
	ModulesPath         string
}

var (
	versionPattern = regexp.MustCompile(`nginx version: [^/\s]+/(\d+)\.(\d+)\.(\d+)`)
	modulesPattern = regexp.MustCompile(`--modules-path=(\S+)`)
)

// ParseBuild reads the output of `nginx -V`.
func ParseBuild(text string) (Build, error) {
	m := versionPattern.FindStringSubmatch(text)
	if m == nil {
		return Build{}, fmt.Errorf("%w: no version in the output of nginx -V", ErrBuild)
	}
	var b Build
	for i, p := range []*int{&b.Major, &b.Minor, &b.Patch} {
		n, err := strconv.Atoi(m[i+1])
		if err != nil {
			return Build{}, fmt.Errorf("%w: version: %w", ErrBuild, err)
		}
		*p = n
	}
	if !b.AtLeast(1, 22, 0) {
		return Build{}, fmt.Errorf("%w: version %s; nginx 1.22 or newer is needed", ErrBuild, b)
	}
	for f := range strings.FieldsSeq(text) {
		switch f {
		case "--with-http_v2_module":
			b.HTTP2 = true
		case "--with-http_realip_module":
			b.RealIP = true
		case "--with-stream":
			b.Stream = true
		case "--with-stream=dynamic":
			b.Stream, b.StreamDynamic = true, true
		}
	}
	if !strings.Contains(text, "--with-http_ssl_module") {
		return Build{}, fmt.Errorf("%w: it is built without http_ssl_module", ErrBuild)
	}
	if m := modulesPattern.FindStringSubmatch(text); m != nil {
		b.ModulesPath = m[1]
	}
	return b, nil
}

// String returns the version as "1.22.1".
func (b Build) String() string { return fmt.Sprintf("%d.%d.%d", b.Major, b.Minor, b.Patch) }

// AtLeast reports whether the version is the given one or newer.
func (b Build) AtLeast(major, minor, patch int) bool {
	switch {
	case b.Major != major:
		return b.Major > major
	case b.Minor != minor:
		return b.Minor > minor
	default:
		return b.Patch >= patch
	}
}
