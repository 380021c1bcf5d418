package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"path"
	"reflect"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

const (
	maxOrder     = 1 << 20 // body of a call about availability
	schemaPrefix = "#/components/schemas/"
	metaCode     = "code" // of an operation: what a wrong body is refused with
)

// call describes one operation of the API.
type call struct {
	method, path string
	id, summary  string
	wrong        policy.Code // what a wrong body is refused with; empty: REQUEST_MALFORMED
}

func (c call) operation(a huma.API) huma.Operation {
	op := huma.Operation{
		Method: c.method, Path: c.path, OperationID: c.id, Summary: c.summary,
		MaxBodyBytes: maxOrder, BodyReadTimeout: readWithin,
		Metadata:  map[string]any{metaCode: Code(c.wrong)},
		Responses: map[string]*huma.Response{},
	}
	if c.wrong == "" {
		op.Metadata[metaCode] = CodeMalformed
	}
	schema := a.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[Problem](), true, "Problem")
	for _, status := range c.problems() {
		op.Responses[status] = &huma.Response{Description: "Refused; the code says why.", Content: map[string]*huma.MediaType{problemType: {Schema: schema}}}
	}
	return op
}

// problems are the statuses of refusals.
func (c call) problems() []string {
	out := []string{"default"}
	add := func(statuses ...int) {
		for _, s := range statuses {
			out = append(out, strconv.Itoa(s))
		}
	}
	if !strings.HasPrefix(c.path, "/v1/availability") && !strings.HasPrefix(c.path, "/v1/nodes/") {
		return out
	}
	add(http.StatusUnprocessableEntity, http.StatusServiceUnavailable)
	if c.id != "list-availability" {
		add(http.StatusNotFound)
	}
	if c.method != http.MethodGet && c.id != "check-availability" {
		add(http.StatusConflict)
	}
	return out
}

// register adds an operation that needs the policy engine.
func register[I, O any](s *Server, a huma.API, c call, h func(context.Context, *I) (*O, error)) {
	huma.Register(a, c.operation(a), guarded(s, h))
}

// order adds an operation that queues work: it is answered with 202, and
// logged.
func order[I any](s *Server, a huma.API, c call, h func(context.Context, *I) (string, policy.Operation, error)) {
	op := c.operation(a)
	op.DefaultStatus = http.StatusAccepted
	huma.Register(a, op, guarded(s, func(ctx context.Context, in *I) (*accepted, error) {
		workload, queued, err := h(ctx, in)
		if err != nil {
			p := *problemOf(err, s.Logger)
			p.workload = workload
			return nil, &p
		}
		s.accepted(ctx, bus.AuditEvent{Request: c.id, Method: c.method, Path: c.pathOf(workload, ""), Workload: workload, Operation: queued.ID, Text: fmt.Sprintf("%s of %s", c.id, workload)})
		return &accepted{Location: "/v1/availability/" + workload + "/operations/" + queued.ID, Body: queued}, nil
	}))
}

// guarded is bounded for a call that needs the policy engine.
func guarded[I, O any](s *Server, h func(context.Context, *I) (*O, error)) func(context.Context, *I) (*O, error) {
	return func(ctx context.Context, in *I) (*O, error) {
		if s.Availability == nil {
			return nil, refuse(http.StatusServiceUnavailable, CodeEngineAway, "the policy engine has not started yet; try again in a moment, and see the controller's log")
		}
		return bounded(s, h)(ctx, in)
	}
}

// bounded bounds a call in time and turns its errors into problems.
func bounded[I, O any](s *Server, h func(context.Context, *I) (*O, error)) func(context.Context, *I) (*O, error) {
	return func(ctx context.Context, in *I) (*O, error) {
		ctx, cancel := context.WithTimeout(ctx, callWithin)
		defer cancel()
		out, err := h(ctx, in)
		if err != nil {
			return nil, problemOf(err, s.Logger)
		}
		return out, nil
	}
}

// mount adds everything that needs the policy engine to mux.
func (s *Server) mount(mux humago.Mux) huma.API {
	a := humago.New(mux, huma.Config{
		OpenAPI: &huma.OpenAPI{
			OpenAPI: "3.1.0",
			Info: &huma.Info{
				Title:   "Opfield Availability",
				Version: "v1",
				Description: "HTTP over the controller's unix socket, for root only. Errors are problem documents (RFC 9457) with a stable code; " +
					"docs/api.md lists the codes. Fields of settings are named in errors without what they are part of.",
			},
			Components: &huma.Components{Schemas: huma.NewMapRegistry(schemaPrefix, schemaName)},
		},
		Formats:       huma.DefaultFormats,
		DefaultFormat: "application/json",
		Transformers:  []huma.Transformer{s.problems},

		RejectUnknownQueryParameters: true,
	})
	s.availabilityRoutes(a)
	s.nodeRoutes(a)
	s.auditRoutes(a)
	return a
}

// schemaName tells types of the same name apart by their package.
func schemaName(t reflect.Type, hint string) string {
	name := huma.DefaultSchemaNamer(t, hint)
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if pkg := path.Base(t.PkgPath()); t.Name() != "" && pkg != "api" && pkg != "." {
		return strings.ToUpper(pkg[:1]) + pkg[1:] + name
	}
	return name
}

// problems turns what the framework refuses into our own document, without
// submitted values, and logs every refusal.
func (s *Server) problems(ctx huma.Context, _ string, v any) (any, error) {
	if m, ok := v.(*huma.ErrorModel); ok {
		v = refused(m, ctx.Operation().Metadata)
	}
	if p, ok := v.(*Problem); ok {
		url := ctx.URL()
		s.refused(ctx.Context(), ctx.Method(), url.Path, p)
	}
	return v, nil
}

func refused(m *huma.ErrorModel, meta map[string]any) *Problem {
	code, _ := meta[metaCode].(Code)
	switch m.Status {
	case http.StatusRequestEntityTooLarge:
		return refuse(m.Status, CodeTooLarge, "the request is too large; at most %d bytes are allowed", maxOrder)
	case http.StatusUnprocessableEntity:
	default:
		return refuse(m.Status, CodeMalformed, "the body is not the expected JSON document")
	}
	var wrong Violations
	for _, d := range m.Errors {
		field, inBody := strings.CutPrefix(d.Location, "body")
		field = strings.TrimPrefix(field, ".")
		field = strings.TrimPrefix(field, "settings.")
		v := Violation{Code: code, Field: field, Message: d.Message}
		if !inBody {
			v.Code = CodeMalformed
			_, v.Field, _ = strings.Cut(d.Location, ".")
		}
		wrong = append(wrong, v)
	}
	if len(wrong) == 0 {
		return refuse(m.Status, CodeMalformed, "the body is not the expected JSON document")
	}
	p := refuse(m.Status, wrong[0].Code, "%s", wrong.Error())
	p.Errors = wrong
	return p
}

// Document returns the OpenAPI document of the API, indented.
func Document() ([]byte, error) {
	a := new(Server).mount(http.NewServeMux())
	doc := a.OpenAPI()
	describeOthers(a)
	schemas := doc.Components.Schemas.Map()
	for _, unused := range []reflect.Type{reflect.TypeFor[huma.ErrorModel](), reflect.TypeFor[huma.ErrorDetail]()} {
		delete(schemas, schemaName(unused, ""))
	}
	doc.Paths["/v1/availability/{workload}"].Get.Responses["304"] = &huma.Response{Description: "Still the version of If-None-Match."}
	for name, schema := range schemas {
		if !requested(name) {
			schema.AdditionalProperties = nil // answers may get further fields
		}
	}
	for _, name := range []string{"SettingsChange", "PolicySettings"} {
		describeSettings(schemas[name].Properties)
	}
	for _, port := range []string{"PortOrder", "PlacementPort"} {
		schemas[port].Properties["protocol"].Enum = []any{placement.ProtocolHTTP, placement.ProtocolGRPC, placement.ProtocolTCP}
	}
	for _, op := range []string{"type", "phase", "status"} {
		schemas["PolicyOperation"].Properties[op].Enum = words()[op]
	}
	b, err := json.MarshalIndent(doc, "", "  ")
	return append(b, '\n'), err
}

// requested reports whether a schema is part of a request: unknown fields are
// refused there.
func requested(name string) bool {
	switch name {
	case "EnableOrder", "PortOrder", "SettingsChange", "DisableOrder", "NodeName", "PolicyChange",
		"RouteList", "CertUpload", "TokenOrder", "IdentityName":
		return true
	}
	return false
}

// describeSettings writes the ranges that package policy checks. They are in
// the document only: what is refused, and with which words, is decided there.
func describeSettings(props map[string]*huma.Schema) {
	between := func(field string, low, high int) {
		from, to := float64(low), float64(high)
		props[field].Minimum, props[field].Maximum = &from, &to
	}
	between("replicas", 1, policy.MaxReplicas)
	between("maxUnavailable", 0, policy.MaxReplicas)
	between("maxSurge", 0, policy.MaxReplicas)
	for _, field := range []string{"replacementGraceSeconds", "drainSeconds", "failbackDelaySeconds"} {
		between(field, 0, policy.MaxSeconds)
	}
	props["mode"].Enum = []any{policy.Replicated, policy.Failover}
	props["nodeSelection"].Enum = []any{policy.AllNodes, policy.SelectedNodes}
	props["partitionMode"].Enum = []any{policy.Strict, policy.Available}
	d := policy.DefaultSettings(policy.Failover)
	for field, value := range map[string]any{
		"replacementGraceSeconds": d.ReplacementGraceSeconds, "maxUnavailable": d.MaxUnavailable, "maxSurge": d.MaxSurge,
		"drainSeconds": d.DrainSeconds, "nodeSelection": d.Selection, "priorityMode": d.PriorityMode,
		"failbackDelaySeconds": d.FailbackDelaySeconds, "partitionMode": d.PartitionMode,
	} {
		props[field].Default = value
	}
	for _, field := range []string{"nodes", "nodePriority"} {
		props[field].UniqueItems = true
	}
}

// words are the values of an operation's enumerations.
func words() map[string][]any {
	out := map[string][]any{
		"type":   {policy.Enable, policy.Scale, policy.Rollout, policy.Heal, policy.Failback, policy.Start, policy.Stop, policy.Restart, policy.Disable, policy.Cleanup},
		"status": {policy.Pending, policy.Running, policy.Waiting, policy.Completed, policy.Failed, policy.CleanupPending, policy.Cancelled},
	}
	for _, p := range policy.Phases() {
		out["phase"] = append(out["phase"], p)
	}
	return out
}

// other is an endpoint that was there before the policy engine: it is served
// by the handlers of Server and only described here.
type other struct {
	call
	in, out any // zero values; nil: nothing
}

func others() []other {
	get, post, put, del := http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete
	return []other{
		{call{get, "/v1/status", "get-status", "Nodes, relays, ingress nodes, routes and links", ""}, nil, Report{}},
		{call{get, "/v1/nodes", "list-nodes", "Every node", ""}, nil, NodeList{}},
		{call{get, "/v1/workloads", "list-workloads", "Every container and Compose project of every node", ""}, nil, WorkloadList{}},
		{call{get, "/v1/routes", "list-routes", "Every route", ""}, nil, RouteList{}},
		{call{post, "/v1/routes", "apply-routes", "Add or replace routes; others stay", ""}, RouteList{}, Applied{}},
		{call{put, "/v1/routes/{name}", "put-route", "Add or replace a route", ""}, map[string]any{}, Applied{}},
		{call{del, "/v1/routes/{name}", "delete-route", "Remove a route", ""}, nil, map[string]any{}},
		{call{get, "/v1/certs", "list-certificates", "Every certificate of routes, without its key", ""}, nil, CertList{}},
		{call{put, "/v1/certs/{name}", "put-certificate", "Add or renew a certificate", ""}, CertUpload{}, Cert{}},
		{call{del, "/v1/certs/{name}", "delete-certificate", "Remove a certificate that no route uses", ""}, nil, map[string]any{}},
		{call{get, "/v1/tokens", "list-tokens", "Every join token, without its secret", ""}, nil, TokenList{}},
		{call{post, "/v1/tokens", "create-token", "Create a one-time join token", ""}, TokenOrder{}, NewToken{}},
		{call{del, "/v1/tokens/{id}", "revoke-token", "Make a token useless", ""}, nil, map[string]any{}},
		{call{get, "/v1/identities", "list-identities", "Every identity", ""}, nil, IdentityList{}},
		{call{post, "/v1/identities/revoke", "revoke-identity", "Revoke an identity", ""}, identity.Name{}, identity.Revocation{}},
		{call{get, "/v1/events", "get-events", "Health events, one CloudEvents document a line; with follow=true also those to come", ""}, nil, nil},
		{call{get, "/v1/openapi.json", "get-openapi", "This document", ""}, nil, map[string]any{}},
	}
}

func describeOthers(a huma.API) {
	reg := a.OpenAPI().Components.Schemas
	content := func(v any, id, role string) map[string]*huma.MediaType {
		return map[string]*huma.MediaType{"application/json": {Schema: reg.Schema(reflect.TypeOf(v), true, id+role)}}
	}
	for _, o := range others() {
		op := o.operation(a)
		op.Responses["200"] = &huma.Response{Description: "OK"}
		switch {
		case o.out != nil:
			op.Responses["200"].Content = content(o.out, o.id, "Response")
		case o.id == "get-events":
			op.Responses["200"].Content = map[string]*huma.MediaType{"application/x-ndjson": {}}
			op.Parameters = []*huma.Param{{Name: "follow", In: "query", Schema: &huma.Schema{Type: huma.TypeBoolean}}}
		}
		if o.in != nil {
			op.RequestBody = &huma.RequestBody{Required: true, Content: content(o.in, o.id, "Request")}
		}
		for part := range strings.SplitSeq(o.path, "/") {
			if name, ok := strings.CutPrefix(part, "{"); ok {
				op.Parameters = append(op.Parameters, &huma.Param{Name: strings.TrimSuffix(name, "}"), In: "path", Required: true, Schema: &huma.Schema{Type: huma.TypeString}})
			}
		}
		a.OpenAPI().AddOperation(&op)
	}
}
