package upstream

import (
	"fmt"
	"time"

	"github.com/opfield/availability/placement"
)

// Route leads clients to one port of a workload. HTTP and gRPC routes are
// chosen by host and path prefix, TCP routes by the port they listen on.
type Route struct {
	Name     string             `json:"name" yaml:"name"`
	Hosts    []string           `json:"hosts,omitempty" yaml:"hosts,omitempty"`
	Path     string             `json:"path,omitempty" yaml:"path,omitempty"` // prefix of whole segments; "/" when empty
	Protocol placement.Protocol `json:"protocol,omitempty" yaml:"protocol,omitempty"`
	Workload string             `json:"workload" yaml:"workload"`
	Port     uint16             `json:"port" yaml:"port"`
	Listen   uint16             `json:"listen,omitempty" yaml:"listen,omitempty"` // TCP routes only
	TLS      *RouteTLS          `json:"tls,omitempty" yaml:"tls,omitempty"`
	Settings RouteSettings      `json:"settings,omitzero" yaml:"settings,omitempty"`
	// Created orders the routes by age: the older one keeps a contested host.
	Created uint64 `json:"created,omitempty" yaml:"created,omitempty"`
}

// RouteTLS says with which certificate a route's hosts are served: one kept
// by the controller, or a pair of files on the ingress node.
type RouteTLS struct {
	Cert     string `json:"cert,omitempty" yaml:"cert,omitempty"`
	CertFile string `json:"certFile,omitempty" yaml:"certFile,omitempty"`
	KeyFile  string `json:"keyFile,omitempty" yaml:"keyFile,omitempty"`
	Redirect bool   `json:"redirect,omitempty" yaml:"redirect,omitempty"` // plain HTTP is sent to HTTPS
}

// RouteSettings tune a route. Every zero value is a good default.
type RouteSettings struct {
	MaxBodyBytes     uint64   `json:"maxBodyBytes,omitempty" yaml:"maxBodyBytes,omitempty"`         // 0 = no limit
	StreamRequest    bool     `json:"streamRequest,omitempty" yaml:"streamRequest,omitempty"`       // pass request bodies on unbuffered; such a request is not repeated once sent
	StreamResponse   bool     `json:"streamResponse,omitempty" yaml:"streamResponse,omitempty"`     // pass response bodies on unbuffered
	ReadTimeout      Duration `json:"readTimeout,omitempty" yaml:"readTimeout,omitempty"`           // silence of the application; 0 = DefaultTimeout
	SendTimeout      Duration `json:"sendTimeout,omitempty" yaml:"sendTimeout,omitempty"`           // silence while sending; 0 = DefaultTimeout
	IdleTimeout      Duration `json:"idleTimeout,omitempty" yaml:"idleTimeout,omitempty"`           // TCP routes: silence both ways; 0 = DefaultTimeout
	BufferKB         uint16   `json:"bufferKB,omitempty" yaml:"bufferKB,omitempty"`                 // response header buffer; 0 = DefaultBufferKB
	FreshConnections bool     `json:"freshConnections,omitempty" yaml:"freshConnections,omitempty"` // POST and the like never reuse a connection
	ProxyProtocol    bool     `json:"proxyProtocol,omitempty" yaml:"proxyProtocol,omitempty"`       // TCP routes: the node writes the PROXY line
}

// Defaults and bounds of the settings.
const (
	DefaultTimeout  = Duration(time.Hour) // an idle WebSocket or event stream lives this long
	MaxTimeout      = Duration(24 * 24 * time.Hour)
	DefaultBufferKB = 32
	MinBufferKB     = 4
	MaxBufferKB     = 1024
	MaxBodyBytes    = 1 << 50
	MaxHosts        = 1000
	MaxPathLength   = 1024
	MaxFileLength   = 1024
	DefaultPath     = "/"
)

// Duration is a time.Duration written as "3.5s" in JSON and YAML.
type Duration time.Duration

// String returns the duration as time.Duration does.
func (d Duration) String() string { return time.Duration(d).String() }

// MarshalText returns the duration as "1m30s".
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads a duration as time.ParseDuration does.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("want a duration like 30s or 1h: %w", err)
	}
	*d = Duration(v)
	return nil
}

// Filled returns the settings with every default written out.
func (s RouteSettings) Filled() RouteSettings {
	for _, d := range []*Duration{&s.ReadTimeout, &s.SendTimeout, &s.IdleTimeout} {
		if *d == 0 {
			*d = DefaultTimeout
		}
	}
	if s.BufferKB == 0 {
		s.BufferKB = DefaultBufferKB
	}
	return s
}
