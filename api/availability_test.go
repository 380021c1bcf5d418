package api_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/api/apitest"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

var update = flag.Bool("update", false, "rewrite docs/openapi.json")

// logBuffer keeps what a server logs.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

type obj = map[string]any

func withPolicies(t *testing.T) (*setup, *apitest.Policies, *logBuffer) {
	t.Helper()
	p := apitest.NewPolicies("n1", "n2", "n3")
	p.Container("n1", "web", placement.Port{Port: 80, Protocol: placement.ProtocolHTTP})
	p.Container("n1", "plain")
	log := &logBuffer{}
	return startWith(t, p, slog.New(slog.NewJSONHandler(log, nil))), p, log
}

func enable(settings obj) obj {
	return obj{"workload": "web", "node": "n1", "container": "web", "settings": settings}
}

// do sends a request and returns status, headers and the decoded answer.
func (s *setup) do(method, path string, body any, header ...string) (*http.Response, map[string]any) {
	s.t.Helper()
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		require.NoError(s.t, err)
		if raw, ok := body.(string); ok {
			b = []byte(raw)
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequest(method, "http://opfield"+path, r)
	require.NoError(s.t, err)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := s.client.Do(req)
	require.NoError(s.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(s.t, err)
	out := map[string]any{}
	if len(text) > 0 {
		require.NoError(s.t, json.Unmarshal(text, &out), string(text))
	}
	return resp, out
}

func TestAvailability_EnableToDisable(t *testing.T) { // API-1, MOD-5, DIS-1, OPS-3
	s, p, log := withPolicies(t)
	var e policy.Eligibility
	require.Empty(t, s.call("POST", "/v1/availability/check", enable(obj{"mode": "failover"}), &e))
	require.True(t, e.OK())
	require.Len(t, e.Nodes, 3)
	require.Empty(t, p.List(), "a check changes nothing")

	resp, op := s.do("POST", "/v1/availability", enable(obj{"mode": "failover", "drainSeconds": 0}))
	require.Equal(t, http.StatusAccepted, resp.StatusCode)
	require.Equal(t, "enable", op["type"])
	require.Equal(t, "pending", op["status"], "accepted is not done")
	require.Equal(t, "/v1/availability/web/operations/web-1", resp.Header.Get("Location"))
	want := policy.DefaultSettings(policy.Failover)
	want.DrainSeconds = 0
	view, _ := p.Get("web")
	require.Equal(t, want, view.Settings, "what is absent has its default, a given zero is kept")

	var got policy.Operation
	require.Empty(t, s.call("GET", resp.Header.Get("Location"), nil, &got))
	require.Equal(t, "web-1", got.ID)
	require.Equal(t, "AVAILABILITY_OPERATION_UNKNOWN", s.call("GET", "/v1/availability/web/operations/web-9", nil, nil))
	p.Work("web", func(_ *policy.View, op *policy.Operation) {
		op.Status, op.Code, op.Message = policy.Failed, "AVAILABILITY_IMAGE_PULL", "no such image"
	})
	require.Empty(t, s.call("POST", "/v1/availability/web/operations/web-1/retry", nil, &got))
	require.Equal(t, policy.Pending, got.Status)
	require.Equal(t, "web-2", got.ID)
	p.Work("web", func(v *policy.View, op *policy.Operation) { op.Status, v.Health = policy.Completed, policy.Healthy })

	for _, verb := range []string{"stop", "start", "restart"} {
		require.Empty(t, s.call("POST", "/v1/availability/web/"+verb, nil, &got))
		require.Equal(t, policy.Type(verb), got.Type)
	}
	var list api.OperationList
	require.Empty(t, s.call("GET", "/v1/availability/web/operations", nil, &list))
	require.Len(t, list.Operations, 5)
	require.Equal(t, policy.Stop, list.Operations[0].Type)
	require.Equal(t, "web-2", list.Operations[3].ID)
	require.Equal(t, "AVAILABILITY_OPERATION_NOT_FAILED", s.call("POST", "/v1/availability/web/operations/web-2/retry", nil, nil))

	require.Equal(t, "AVAILABILITY_CONFIRMATION_REQUIRED confirm", s.call("POST", "/v1/availability/web/disable", obj{"survivor": "n1"}, nil))
	require.Equal(t, "AVAILABILITY_SURVIVOR_REQUIRED survivor", s.call("POST", "/v1/availability/web/disable", obj{"confirm": "web"}, nil))
	require.Empty(t, s.call("POST", "/v1/availability/web/disable", obj{"survivor": "n1", "confirm": "web"}, nil))
	require.Equal(t, "AVAILABILITY_DISABLE_IN_PROGRESS", s.call("POST", "/v1/availability/web/start", nil, nil))
	for range 4 {
		p.Work("web", func(_ *policy.View, op *policy.Operation) { op.Status = policy.Completed })
	}
	require.Equal(t, "AVAILABILITY_NOT_ENABLED", s.call("GET", "/v1/availability/web", nil, nil))

	text := log.String()
	require.Contains(t, text, `"request":"enable-availability","workload":"web","operation":"web-1"`) // OBS-2
	require.Contains(t, text, `"path":"/v1/availability/web/disable","code":"AVAILABILITY_SURVIVOR_REQUIRED","workload":"web"`)
}

func TestAvailability_Refusals(t *testing.T) { // SET-3, ELG-4, API-1
	s, p, log := withPolicies(t)
	for want, body := range map[string]any{
		"AVAILABILITY_SETTINGS_INVALID mode":          enable(nil),
		"AVAILABILITY_SETTINGS_INVALID replicas":      enable(obj{"mode": "replicated", "replicas": 40}),
		"AVAILABILITY_SETTINGS_INVALID maxSurge":      enable(obj{"mode": "failover", "maxSurge": "secret-value"}),
		"AVAILABILITY_SETTINGS_INVALID drainSecs":     enable(obj{"mode": "failover", "drainSecs": 5}),
		"AVAILABILITY_SETTINGS_INVALID nodes[1]":      enable(obj{"mode": "failover", "nodeSelection": "selected", "nodes": []string{"n1", "n1"}}),
		"AVAILABILITY_SETTINGS_INVALID drainSeconds":  enable(obj{"mode": "failover", "drainSeconds": 3601}),
		"AVAILABILITY_SETTINGS_INVALID colour":        obj{"workload": "web", "node": "n1", "container": "web", "settings": obj{"mode": "failover"}, "colour": 1},
		"AVAILABILITY_SETTINGS_INVALID ports[0].port": obj{"workload": "web", "node": "n1", "container": "web", "ports": []obj{{"port": "secret-value"}}, "settings": obj{"mode": "failover"}},
		"AVAILABILITY_NODE_UNKNOWN":                   obj{"workload": "web", "node": "n9", "container": "web", "settings": obj{"mode": "failover"}},
		"AVAILABILITY_CONTAINER_UNKNOWN":              obj{"workload": "web", "node": "n1", "container": "no", "settings": obj{"mode": "failover"}},
		"REQUEST_MALFORMED":                           `{"workload": secret-value`,
		"REQUEST_TOO_LARGE":                           `{"workload":"` + strings.Repeat("x", 1<<20) + `"}`,
	} {
		require.Equal(t, want, s.call("POST", "/v1/availability", body, nil))
		require.Equal(t, want, s.call("POST", "/v1/availability/check", body, nil))
	}
	resp, problem := s.do("POST", "/v1/availability", enable(obj{"mode": "failover", "replicas": 3, "maxSurge": 33, "partitionMode": "maybe"}))
	require.Equal(t, http.StatusUnprocessableEntity, resp.StatusCode)
	require.Len(t, problem["errors"], 3, "everything that is wrong is said at once")
	require.Contains(t, problem["detail"], "maxSurge: 33 is outside of 0 to 32")

	p.Find([]policy.Notice{{Code: policy.CodeMounts, Message: "volume data at /data"}}, nil)
	resp, problem = s.do("POST", "/v1/availability", enable(obj{"mode": "failover"}))
	require.Equal(t, http.StatusConflict, resp.StatusCode)
	require.Equal(t, "AVAILABILITY_PREFLIGHT_BLOCKED", problem["code"])
	eligibility := problem["eligibility"].(map[string]any)
	require.Len(t, eligibility["nodes"], 3)
	require.Len(t, eligibility["blockers"], 1)
	require.Empty(t, p.List(), "nothing is stored")

	p.Find(nil, nil)
	require.Equal(t, "AVAILABILITY_PREFLIGHT_BLOCKED", s.call("POST", "/v1/availability", obj{"workload": "p", "node": "n1", "container": "plain", "settings": obj{"mode": "failover"}}, nil))
	require.Empty(t, s.call("POST", "/v1/availability", enable(obj{"mode": "failover"}), nil))
	require.Equal(t, "AVAILABILITY_PLACEMENT_MANAGED", s.call("POST", "/v1/availability", enable(obj{"mode": "failover"}), nil)) // MOD-4
	for _, path := range []string{"/rollout", "/disable", "/stop", "/start", "/restart", "/operations/x/retry"} {
		resp, problem := s.do("POST", "/v1/availability/none"+path, obj{})
		require.Equal(t, http.StatusNotFound, resp.StatusCode, path)
		require.Equal(t, "AVAILABILITY_NOT_ENABLED", problem["code"])
	}
	require.Equal(t, "REQUEST_MALFORMED wait", s.call("GET", "/v1/availability/web?wait=long", nil, nil))
	require.Equal(t, "REQUEST_MALFORMED until", s.call("GET", "/v1/availability/web?until=5", nil, nil))
	require.NotContains(t, log.String(), "secret-value") // SEC-3
}

func TestAvailability_Settings(t *testing.T) { // SET-3
	s, p, _ := withPolicies(t)
	require.Empty(t, s.call("POST", "/v1/availability", enable(obj{"mode": "failover", "maxSurge": 2, "nodeSelection": "selected", "nodes": []string{"n1", "n2"}}), nil))
	settings := func() policy.Settings {
		v, ok := p.Get("web")
		require.True(t, ok)
		return v.Settings
	}
	require.Empty(t, s.call("PATCH", "/v1/availability/web/settings", obj{"mode": "replicated", "nodeSelection": "all", "priorityMode": true, "nodePriority": []string{"n2", "n1"}}, nil))
	want := policy.DefaultSettings(policy.Replicated)
	want.MaxSurge, want.PriorityMode, want.NodePriority = 2, true, []string{"n2", "n1"}
	require.Equal(t, want, settings(), "the others stay; copies follow the mode and the list of nodes the selection")
	require.Empty(t, s.call("PATCH", "/v1/availability/web/settings", obj{}, nil), "unchanged values repair too") // LOS-2
	require.Equal(t, want, settings())

	require.Equal(t, "AVAILABILITY_SETTINGS_INVALID replicas", s.call("PATCH", "/v1/availability/web/settings", obj{"replicas": 1}, nil))
	require.Equal(t, "AVAILABILITY_SETTINGS_INVALID speed", s.call("PATCH", "/v1/availability/web/settings", obj{"speed": 1}, nil))
	require.Equal(t, want, settings(), "nothing of a refused change is stored")
	require.Empty(t, s.call("PUT", "/v1/availability/web/settings", obj{"mode": "failover"}, nil))
	require.Equal(t, policy.DefaultSettings(policy.Failover), settings())
	require.Equal(t, "AVAILABILITY_SETTINGS_INVALID mode", s.call("PUT", "/v1/availability/web/settings", obj{}, nil))
	require.Equal(t, "AVAILABILITY_NOT_ENABLED", s.call("PATCH", "/v1/availability/none/settings", obj{}, nil))
}

func TestAvailability_Rollout(t *testing.T) { // ROL-6, SEC-3
	s, p, log := withPolicies(t)
	require.Empty(t, s.call("POST", "/v1/availability", enable(obj{"mode": "failover"}), nil))
	require.Empty(t, s.call("POST", "/v1/availability/web/rollout", obj{"image": "web:2", "env": obj{"TOKEN": "secret-value", "OLD": nil}, "command": []string{}}, nil))
	value := "secret-value"
	require.Equal(t, []policy.Change{{Image: "web:2", Env: map[string]*string{"TOKEN": &value, "OLD": nil}, Command: &[]string{}}}, p.Changes("web"))
	require.Equal(t, "AVAILABILITY_CHANGE_EMPTY", s.call("POST", "/v1/availability/web/rollout", obj{}, nil))

	for _, body := range []any{
		obj{"env": obj{"A": obj{"x": "secret-value"}}}, obj{"env": "secret-value"}, obj{"secret": "secret-value"}, obj{"memory": "secret-value"}, `{"env":{"A":"secret-value"`,
	} {
		resp, problem := s.do("POST", "/v1/availability/web/rollout", body)
		require.GreaterOrEqual(t, resp.StatusCode, 400)
		b, err := json.Marshal(problem)
		require.NoError(t, err)
		require.NotContains(t, string(b), "secret-value")
	}
	require.Equal(t, "AVAILABILITY_CHANGE_INVALID env.A", s.call("POST", "/v1/availability/web/rollout", obj{"env": obj{"A": 5}}, nil))
	require.NotContains(t, log.String(), "secret-value")
}

func TestAvailability_LongPoll(t *testing.T) { // API-3
	s, p, _ := withPolicies(t)
	require.Empty(t, s.call("POST", "/v1/availability", enable(obj{"mode": "failover"}), nil))
	resp, view := s.do("GET", "/v1/availability/web", nil)
	require.Equal(t, "web", view["workload"])
	tag := resp.Header.Get("ETag")
	require.NotEmpty(t, tag)
	resp, _ = s.do("GET", "/v1/availability/web", nil, "If-None-Match", tag)
	require.Equal(t, http.StatusNotModified, resp.StatusCode)

	type answer struct {
		status int
		phase  any
	}
	got := make(chan answer, 1)
	go func() {
		resp, view := s.do("GET", "/v1/availability/web?wait=15", nil, "If-None-Match", tag)
		op, _ := view["operation"].(map[string]any)
		got <- answer{resp.StatusCode, op["phase"]}
	}()
	select {
	case a := <-got:
		t.Fatalf("answered %v without a change", a)
	default:
	}
	p.Work("web", func(_ *policy.View, op *policy.Operation) { op.Phase, op.Status = policy.Starting, policy.Running })
	require.Equal(t, answer{http.StatusOK, "starting"}, <-got)
	resp, _ = s.do("GET", "/v1/availability/web?wait=1", nil, "If-None-Match", "\"old\"")
	require.Equal(t, http.StatusOK, resp.StatusCode)
	resp, _ = s.do("GET", "/v1/availability/web?wait=1", nil, "If-None-Match", resp.Header.Get("ETag"))
	require.Equal(t, http.StatusNotModified, resp.StatusCode)
}

func TestAvailability_Nodes(t *testing.T) { // API-1, LOS-4
	s, p, _ := withPolicies(t)
	require.Empty(t, s.call("POST", "/v1/availability", enable(obj{"mode": "failover"}), nil))
	drained := func() bool { return p.Nodes()[1].Drained }
	require.Empty(t, s.call("POST", "/v1/nodes/n2/drain", nil, nil))
	require.True(t, drained())
	require.Empty(t, s.call("POST", "/v1/nodes/n2/undrain", nil, nil))
	require.False(t, drained())
	require.Empty(t, s.call("PUT", "/v1/nodes/n2/name", obj{"name": "Rack 2"}, nil))
	require.Equal(t, "Rack 2", p.Name("n2"))
	require.Equal(t, "AVAILABILITY_NODE_NOT_LOST", s.call("POST", "/v1/nodes/n2/confirm-lost", nil, nil))
	p.Silence("n2")
	require.Empty(t, s.call("POST", "/v1/nodes/n2/confirm-lost", nil, nil))
	require.True(t, p.Lost("n2"))
	require.Equal(t, "AVAILABILITY_NODE_IN_USE", s.call("DELETE", "/v1/nodes/n1", nil, nil))
	require.Empty(t, s.call("DELETE", "/v1/nodes/n3", nil, nil))
	resp, problem := s.do("POST", "/v1/nodes/n3/drain", nil)
	require.Equal(t, http.StatusNotFound, resp.StatusCode)
	require.Equal(t, "AVAILABILITY_NODE_UNKNOWN", problem["code"])

	var rep api.Report
	require.Empty(t, s.call("GET", "/v1/status", nil, &rep))
	require.Len(t, rep.Policies, 1)
}

func TestAvailability_BeforeTheEngine(t *testing.T) { // API-1
	s := startWith(t, nil, bustest.Logger(t))
	for _, path := range []string{"/v1/availability", "/v1/availability/web", "/v1/availability/web/operations"} {
		resp, problem := s.do("GET", path, nil)
		require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
		require.Equal(t, "AVAILABILITY_ENGINE_UNAVAILABLE", problem["code"])
	}
	require.Equal(t, "AVAILABILITY_ENGINE_UNAVAILABLE", s.call("POST", "/v1/nodes/n1/drain", nil, nil))
	require.Empty(t, s.call("GET", "/v1/status", nil, nil))
}

func TestOpenAPI(t *testing.T) { // API-1
	s, _, _ := withPolicies(t)
	resp, served := s.do("GET", "/v1/openapi.json", nil)
	require.Equal(t, "application/openapi+json", resp.Header.Get("Content-Type"))
	doc, err := api.Document()
	require.NoError(t, err)
	const file = "../docs/openapi.json"
	if *update {
		require.NoError(t, os.WriteFile(file, doc, 0o644))
	}
	kept, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(kept), string(doc), "go test ./api -run OpenAPI -update rewrites it")
	var written map[string]any
	require.NoError(t, json.Unmarshal(kept, &written))
	require.Equal(t, written, served)
	require.Regexp(t, `^3\.1\.\d+$`, written["openapi"])

	ids := map[string]bool{}
	refs := func(v any) []string {
		b, err := json.Marshal(v)
		require.NoError(t, err)
		var out []string
		for _, part := range strings.Split(string(b), `"$ref":"#/components/schemas/`)[1:] {
			out = append(out, part[:strings.Index(part, `"`)])
		}
		return out
	}
	schemas := written["components"].(map[string]any)["schemas"].(map[string]any)
	for _, name := range refs(written) {
		require.Contains(t, schemas, name)
	}
	count := 0
	for path, item := range written["paths"].(map[string]any) {
		for method, raw := range item.(map[string]any) {
			op := raw.(map[string]any)
			count++
			id := op["operationId"].(string)
			require.False(t, ids[id], id)
			ids[id] = true
			require.NotEmpty(t, op["summary"], id)
			problem := false
			for status, r := range op["responses"].(map[string]any) {
				content, _ := r.(map[string]any)["content"].(map[string]any)
				_, is := content["application/problem+json"]
				require.Equal(t, status == "default" || status >= "400", is, "%s %s %s", method, path, status)
				problem = problem || is
			}
			require.True(t, problem, id)
			params, _ := op["parameters"].([]any)
			inPath := 0
			for _, p := range params {
				if p.(map[string]any)["in"] == "path" {
					inPath++
				}
			}
			require.Equal(t, strings.Count(path, "{"), inPath, id)
		}
	}
	require.Greater(t, count, 30)
	settings := schemas["SettingsChange"].(map[string]any)["properties"].(map[string]any)
	require.EqualValues(t, policy.MaxSeconds, settings["drainSeconds"].(map[string]any)["maximum"])
	require.NotContains(t, string(kept), "Huma")
}

func TestAvailability_NotReady(t *testing.T) { // API-1
	s, p, _ := withPolicies(t)
	require.Empty(t, s.call("POST", "/v1/availability", enable(obj{"mode": "failover"}), nil))
	p.SetKnown(false)
	const code = "AVAILABILITY_CONTROLLER_NOT_READY"
	resp, problem := s.do("GET", "/v1/availability", nil)
	require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
	require.Equal(t, code, problem["code"])
	for _, workload := range []string{"web", "none"} {
		require.Equal(t, code, s.call("GET", "/v1/availability/"+workload, nil, nil), "it does not know whether there is one")
		require.Equal(t, code, s.call("PATCH", "/v1/availability/"+workload+"/settings", obj{"maxSurge": 1}, nil))
	}
	var rep api.Report
	require.Empty(t, s.call("GET", "/v1/status", nil, &rep))
	require.Contains(t, strings.Join(rep.Warnings, " "), "available workloads are not shown")
	p.SetKnown(true)
	require.Equal(t, "AVAILABILITY_NOT_ENABLED", s.call("GET", "/v1/availability/none", nil, nil))
	require.Empty(t, s.call("GET", "/v1/availability/web", nil, nil))
}
