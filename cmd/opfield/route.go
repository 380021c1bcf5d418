package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/upstream"
)

type routeCmd struct {
	Add    routeAddCmd    `cmd:"" help:"Add a route, or replace the one of that name."`
	Apply  routeApplyCmd  `cmd:"" help:"Add or replace all routes of a file; others stay."`
	List   routeListCmd   `cmd:"" help:"List routes."`
	Remove routeRemoveCmd `cmd:"" help:"Remove a route."`
}

type routeAddCmd struct {
	Name     string   `arg:"" optional:"" help:"Name of the route."`
	File     string   `short:"f" help:"YAML file with routes, instead of the other flags." type:"existingfile"`
	Host     []string `help:"Host name, such as example.com or *.example.com; repeatable."`
	Path     string   `help:"Path prefix."`
	Protocol string   `help:"http, grpc or tcp."`
	Workload string   `help:"Workload it leads to."`
	Port     uint16   `help:"Port of the workload."`
	Listen   uint16   `help:"Port on the ingress nodes (tcp only)."`
	Cert     string   `help:"Certificate kept by the controller, for HTTPS."`
	CertFile string   `help:"Certificate file on the ingress nodes."`
	KeyFile  string   `help:"Key file on the ingress nodes."`
	Redirect bool     `help:"Send HTTP to HTTPS."`
}

func (c *routeAddCmd) Run(s *session) error {
	if c.File != "" {
		if c.Name != "" || c.Workload != "" || len(c.Host) > 0 {
			return usageError("-f: want either a file or a name with flags; remove one of the two")
		}
		return applyFile(s, c.File)
	}
	if c.Name == "" {
		return usageError("name: want the route's name, or -f with a file")
	}
	r := upstream.Route{
		Name: c.Name, Hosts: c.Host, Path: c.Path, Protocol: placement.Protocol(c.Protocol),
		Workload: c.Workload, Port: c.Port, Listen: c.Listen,
	}
	if c.Cert != "" || c.CertFile != "" || c.KeyFile != "" || c.Redirect {
		r.TLS = &upstream.RouteTLS{Cert: c.Cert, CertFile: c.CertFile, KeyFile: c.KeyFile, Redirect: c.Redirect}
	}
	return apply(s, http.MethodPut, "/v1/routes/"+url.PathEscape(c.Name), r)
}

type routeApplyCmd struct {
	File string `short:"f" required:"" help:"YAML file with routes." type:"existingfile"`
}

func (c *routeApplyCmd) Run(s *session) error { return applyFile(s, c.File) }

func applyFile(s *session, path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	routes, err := parseRoutes(b)
	if err != nil {
		return usageError(fmt.Sprintf("-f %s: %s", path, yamlText(err)))
	}
	return apply(s, http.MethodPost, "/v1/routes", map[string]any{"routes": routes})
}

// parseRoutes reads a strict YAML document with one list, routes.
func parseRoutes(b []byte) ([]upstream.Route, error) {
	var file struct {
		Routes []upstream.Route `yaml:"routes"`
	}
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	err := d.Decode(&file)
	switch {
	case errors.Is(err, io.EOF), err == nil && len(file.Routes) == 0:
		return nil, errors.New("routes: want a list of routes")
	case err != nil:
		return nil, err
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		return nil, errors.New("want one YAML document; join them under one routes: list")
	}
	return file.Routes, nil
}

func apply(s *session, method, path string, body any) error {
	var out api.Applied
	if err := s.client.call(s.ctx, method, path, body, &out); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(out)
	}
	s.say("%d added, %d changed, %d unchanged", len(out.Added), len(out.Changed), len(out.Unchanged))
	return nil
}

type routeListCmd struct{}

func (routeListCmd) Run(s *session) error {
	var out struct {
		Routes []upstream.Route `json:"routes"`
	}
	if err := s.client.call(s.ctx, http.MethodGet, "/v1/routes", nil, &out); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(out)
	}
	rows := [][]string{{"ROUTE", "PROTOCOL", "FROM", "TO", "TLS"}}
	for _, r := range out.Routes {
		rows = append(rows, []string{r.Name, string(r.Protocol), from(r), to(r), tlsOf(r)})
	}
	return table(s.out, rows)
}

func from(r upstream.Route) string {
	if r.Protocol == placement.ProtocolTCP {
		return ":" + strconv.Itoa(int(r.Listen))
	}
	return strings.Join(r.Hosts, " ") + " " + r.Path
}

func to(r upstream.Route) string { return fmt.Sprintf("%s:%d", r.Workload, r.Port) }

func tlsOf(r upstream.Route) string {
	switch {
	case r.TLS == nil:
		return ""
	case r.TLS.Cert != "":
		return r.TLS.Cert
	default:
		return r.TLS.CertFile
	}
}

type routeRemoveCmd struct {
	Name string `arg:""`
}

func (c *routeRemoveCmd) Run(s *session) error {
	if err := s.client.call(s.ctx, http.MethodDelete, "/v1/routes/"+url.PathEscape(c.Name), nil, nil); err != nil {
		return err
	}
	s.say("route %s is removed", c.Name)
	return nil
}

// checkRoute is the API's route checker.
func checkRoute(raw json.RawMessage) (string, json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	var r upstream.Route
	if err := d.Decode(&r); err != nil {
		if t, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return "", nil, api.Violations{{Code: api.CodeRouteInvalid, Field: t.Field, Message: "want " + t.Type.String()}}
		}
		return "", nil, api.Violations{{Code: api.CodeRouteInvalid, Field: "route", Message: err.Error()}}
	}
	r.Created = 0
	r, err := r.Normalised()
	if ps, ok := errors.AsType[upstream.Problems](err); ok {
		var out api.Violations
		for _, p := range ps {
			out = append(out, api.Violation{Code: api.Code(p.Code), Field: p.Field, Message: p.Message})
		}
		return "", nil, out
	}
	if err != nil {
		return "", nil, err
	}
	b, err := json.Marshal(r)
	return r.Name, b, err
}
