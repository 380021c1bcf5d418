package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/opfield/availability/bus"
)

// RouteList is the answer of GET /v1/routes and the body of POST /v1/routes.
type RouteList struct {
	Routes []json.RawMessage `json:"routes"`
}

// Applied is the answer of POST /v1/routes.
type Applied struct {
	Added     []string `json:"added"`
	Changed   []string `json:"changed"`
	Unchanged []string `json:"unchanged"`
}

// ageAndCert are the fields of a route that the API itself uses.
type ageAndCert struct {
	Created uint64 `json:"created"`
	TLS     *struct {
		Cert string `json:"cert"`
	} `json:"tls"`
}

func fieldsOf(route []byte) ageAndCert {
	var f ageAndCert
	_ = json.Unmarshal(route, &f) // written by us; damaged: as if it had none
	return f
}

func (s *Server) listRoutes(ctx context.Context, _ *http.Request) (any, error) {
	stored, err := s.Conn.ReadBucket(ctx, bus.BucketRoutes)
	if err != nil {
		return nil, err
	}
	out := RouteList{Routes: []json.RawMessage{}}
	for _, name := range slices.Sorted(maps.Keys(stored)) {
		if json.Valid(stored[name]) {
			out.Routes = append(out.Routes, stored[name])
		}
	}
	return out, nil
}

func (s *Server) putRoute(ctx context.Context, r *http.Request) (any, error) {
	var body json.RawMessage
	if err := decode(r, &body); err != nil {
		return nil, err
	}
	return s.apply(ctx, []json.RawMessage{body}, r.PathValue("name"))
}

func (s *Server) applyRoutes(ctx context.Context, r *http.Request) (any, error) {
	var body RouteList
	if err := decode(r, &body); err != nil {
		return nil, err
	}
	return s.apply(ctx, body.Routes, "")
}

// apply checks all routes before it writes the first. A route that exists is
// replaced and keeps its age; nothing is removed.
func (s *Server) apply(ctx context.Context, routes []json.RawMessage, only string) (any, error) {
	s.write.Lock()
	defer s.write.Unlock()
	stored, err := s.Conn.ReadBucket(ctx, bus.BucketRoutes)
	if err != nil {
		return nil, err
	}
	certs, err := s.Conn.ReadBucket(ctx, bus.BucketCerts)
	if err != nil {
		return nil, err
	}
	newest := uint64(0)
	for _, v := range stored {
		newest = max(newest, fieldsOf(v).Created)
	}
	var wrong Violations
	wanted := map[string][]byte{}
	var order []string
	for i, raw := range routes {
		name, normal, err := s.CheckRoute(raw)
		at := ""
		if only == "" {
			at = fmt.Sprintf("routes[%d].", i)
		}
		if v, ok := err.(Violations); ok {
			for _, one := range v {
				one.Field = at + one.Field
				wrong = append(wrong, one)
			}
			continue
		}
		if err != nil {
			return nil, refuse(http.StatusUnprocessableEntity, CodeRouteInvalid, "%s%v", at, err)
		}
		switch cert := fieldsOf(normal).TLS; {
		case only != "" && name != only:
			wrong = append(wrong, Violation{CodeRouteName, at + "name", "want " + only + ", the name in the address"})
			continue
		case wanted[name] != nil:
			wrong = append(wrong, Violation{CodeRouteTwice, at + "name", "two routes are called " + name + "; rename one"})
			continue
		case cert != nil && cert.Cert != "" && certs[cert.Cert] == nil:
			wrong = append(wrong, Violation{CodeRouteCert, at + "tls.cert", "there is no certificate " + cert.Cert + "; add it first with `opfield cert add`"})
			continue
		}
		created := fieldsOf(stored[name]).Created
		if created == 0 {
			newest++
			created = newest
		}
		if wanted[name], err = withCreated(normal, created); err != nil {
			return nil, err
		}
		order = append(order, name)
	}
	if len(wrong) > 0 {
		return nil, wrong
	}
	return s.storeRoutes(ctx, order, wanted, stored)
}

func (s *Server) storeRoutes(ctx context.Context, order []string, wanted, stored map[string][]byte) (any, error) {
	out := Applied{Added: []string{}, Changed: []string{}, Unchanged: []string{}}
	for _, name := range order {
		if bytes.Equal(stored[name], wanted[name]) {
			out.Unchanged = append(out.Unchanged, name)
			continue
		}
		if err := s.Store.Put(ctx, bus.BucketRoutes, name, wanted[name]); err != nil {
			return nil, err
		}
		if stored[name] == nil {
			out.Added = append(out.Added, name)
		} else {
			out.Changed = append(out.Changed, name)
		}
		s.Logger.Info("route stored", "route", name)
	}
	return out, nil
}

// withCreated sets the age, whatever the request says about it.
func withCreated(route json.RawMessage, created uint64) ([]byte, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(route, &fields); err != nil {
		return nil, err
	}
	fields["created"] = fmt.Append(nil, created)
	return json.Marshal(fields) // sorted keys: equal routes are equal bytes
}

func (s *Server) deleteRoute(ctx context.Context, r *http.Request) (any, error) {
	s.write.Lock()
	defer s.write.Unlock()
	name := r.PathValue("name")
	if err := s.remove(ctx, bus.BucketRoutes, name, "route"); err != nil {
		return nil, err
	}
	s.Logger.Info("route removed", "route", name)
	return struct{}{}, nil
}

func (s *Server) remove(ctx context.Context, bucket, name, what string) error {
	stored, err := s.Conn.ReadBucket(ctx, bucket)
	if err != nil {
		return err
	}
	if stored[name] == nil {
		return refuse(http.StatusNotFound, CodeNotFound, "there is no %s %q; see `opfield %s list`", what, name, strings.TrimSuffix(what, "ificate"))
	}
	return s.Store.Delete(ctx, bucket, name)
}
