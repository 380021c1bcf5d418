package bus_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity/identitytest"
	"github.com/opfield/availability/placement"
)

// validate checks v against the part of JSON Schema that our files use. It
// also refuses undocumented fields, which the schema itself allows.
func validate(schema map[string]any, v any, at string) error {
	for keyword, want := range schema {
		var err error
		switch keyword {
		case "$schema", "$id", "title", "description", "format":
		case "const":
			if v != want {
				err = fmt.Errorf("want %v", want)
			}
		case "enum":
			if !slices.Contains(want.([]any), v) {
				err = fmt.Errorf("want one of %v", want)
			}
		case "type":
			err = checkType(want.(string), v)
		case "pattern":
			if s, ok := v.(string); ok && !regexp.MustCompile(want.(string)).MatchString(s) {
				err = fmt.Errorf("want %v", want)
			}
		case "minimum", "maximum":
			if n, ok := v.(float64); ok && (keyword == "minimum" && n < want.(float64) || keyword == "maximum" && n > want.(float64)) {
				err = fmt.Errorf("want %s %v", keyword, want)
			}
		case "maxLength":
			if s, ok := v.(string); ok && float64(len(s)) > want.(float64) {
				err = fmt.Errorf("too long")
			}
		case "maxItems":
			if l, ok := v.([]any); ok && float64(len(l)) > want.(float64) {
				err = fmt.Errorf("too many")
			}
		case "items":
			l, _ := v.([]any)
			for i, item := range l {
				if err == nil {
					err = validate(want.(map[string]any), item, fmt.Sprintf("%s[%d]", at, i))
				}
			}
		case "required":
			m, _ := v.(map[string]any)
			for _, name := range want.([]any) {
				if _, ok := m[name.(string)]; !ok {
					err = fmt.Errorf("lacks %v", name)
				}
			}
		case "properties":
			m, _ := v.(map[string]any)
			for name, value := range m {
				sub, ok := want.(map[string]any)[name].(map[string]any)
				if !ok {
					return fmt.Errorf("%s.%s is not documented", at, name)
				}
				if err == nil {
					err = validate(sub, value, at+"."+name)
				}
			}
		default:
			err = fmt.Errorf("the validator does not know %q", keyword)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
	}
	return nil
}

func checkType(want string, v any) error {
	ok := false
	switch want {
	case "object":
		_, ok = v.(map[string]any)
	case "array":
		_, ok = v.([]any)
	case "string":
		_, ok = v.(string)
	case "boolean":
		_, ok = v.(bool)
	case "integer":
		n, is := v.(float64)
		ok = is && n == math.Trunc(n)
	}
	if !ok {
		return fmt.Errorf("want %s", want)
	}
	return nil
}

func readSchema(t *testing.T, name string) map[string]any {
	t.Helper()
	b, err := os.ReadFile("../docs/schema/" + name)
	require.NoError(t, err)
	var out map[string]any
	require.NoError(t, json.Unmarshal(b, &out))
	return out
}

func decoded(t *testing.T, b []byte, err error) any {
	t.Helper()
	require.NoError(t, err)
	var v any
	require.NoError(t, json.Unmarshal(b, &v))
	return v
}

func TestSchema_Placement(t *testing.T) { // EVT-2
	schema := readSchema(t, "placement-health-v1.json")
	full := event("shop", "node-1", 3, true)
	full.Reason, full.Generation, full.Epoch = "health check", 2, 9
	bare := event("shop", "node-1", 1, false)
	bare.Ports, bare.ObservedAt = nil, time.Time{}
	events := []placement.Event{full, bare}
	for _, s := range []placement.State{placement.StateStarting, placement.StateUnhealthy, placement.StateStopped, placement.StateLost, placement.StateRemoved} {
		e := full
		e.State = s
		events = append(events, e)
	}
	for _, r := range []placement.Role{placement.RoleStandby, placement.RoleDraining, placement.RoleStopped} {
		e := full
		e.Role = r
		events = append(events, e)
	}
	for _, k := range []placement.Kind{placement.KindDeployment, placement.KindCompose} {
		e := full
		e.Kind = k
		events = append(events, e)
	}
	for _, e := range events {
		b, err := e.Marshal()
		require.NoError(t, validate(schema, decoded(t, b, err), "event"))
	}
	// The validator is not a rubber stamp.
	b, err := full.Marshal()
	require.NoError(t, err)
	for _, change := range [][2]string{{`"shop"`, `"SHOP"`}, {`"running"`, `"gone"`}, {`"ready":true`, `"ready":1`}, {`"port":8080`, `"port":0`}, {`"epoch":9,`, ``}, {"health.v1", "health.v2"}} {
		bad := strings.Replace(string(b), change[0], change[1], 1)
		require.NotEqual(t, string(b), bad)
		require.Error(t, validate(schema, decoded(t, []byte(bad), nil), "event"), change)
	}
}

func TestSchema_Node(t *testing.T) {
	schema := readSchema(t, "node-liveness-v1.json")
	for _, s := range []bus.NodeState{bus.NodeOnline, bus.NodeOffline} {
		b, err := bus.NodeEvent{Node: "node-1", State: s, Since: time.Now(), Number: 1, Reason: "x"}.Marshal()
		require.NoError(t, validate(schema, decoded(t, b, err), "event"))
	}
}

func TestSchema_Audit(t *testing.T) { // OBS-2
	schema := readSchema(t, "audit-v1.json")
	srv := bustest.Start(t, identitytest.New(t))
	log, _ := auditLog(t, srv, 0)
	bustest.Go(t, log.Run)
	kinds := []bus.AuditKind{bus.AuditAccepted, bus.AuditRefused, bus.AuditOperation, bus.AuditStep, bus.AuditRepaired, bus.AuditTakeover, bus.AuditEnded}
	for _, k := range kinds {
		log.Add(bus.AuditEvent{Kind: k, Text: "x"})
		log.Add(bus.AuditEvent{
			Kind: k, Text: "x", Workload: "shop", Node: "node-1", Operation: "shop-3", Code: "NODE_OFFLINE", Request: "enable-availability",
			Method: "POST", Path: "/v1/availability", Who: "uid 0", At: time.Now(),
		})
	}
	var page bus.AuditPage
	require.Eventually(t, func() bool {
		var err error
		page, err = srv.Controller.ReadAudit(t.Context(), bus.AuditQuery{}, 0)
		return err == nil && len(page.Events) == 2*len(kinds)
	}, soon, poll)
	for _, m := range page.Events {
		b, err := json.Marshal(m)
		require.NoError(t, validate(schema, decoded(t, b, err), "event"))
	}
	b, err := json.Marshal(page.Events[1])
	require.NoError(t, err)
	for _, change := range [][2]string{{`"shop"`, `"SHOP"`}, {`"accepted"`, `"wished"`}, {`"text":"x",`, ``}, {"audit.v1", "audit.v2"}} {
		bad := strings.Replace(string(b), change[0], change[1], 1)
		require.NotEqual(t, string(b), bad)
		require.Error(t, validate(schema, decoded(t, []byte(bad), nil), "event"), change)
	}
}

func TestDocs_NameTheRealThing(t *testing.T) { // EVT-2
	var doc struct {
		AsyncAPI string `yaml:"asyncapi"`
		Channels map[string]struct {
			Address string `yaml:"address"`
		} `yaml:"channels"`
		Components struct {
			Messages map[string]struct {
				Name    string `yaml:"name"`
				Payload struct {
					Ref string `yaml:"$ref"`
				} `yaml:"payload"`
			} `yaml:"messages"`
		} `yaml:"components"`
	}
	b, err := os.ReadFile("../docs/asyncapi.yaml")
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(b, &doc))
	require.Equal(t, "3.0.0", doc.AsyncAPI)
	id := placement.ID{Workload: "{workload}", Node: "{node}"}
	require.Equal(t, id.Subject(), doc.Channels["placementHealth"].Address)
	require.Equal(t, placement.EventType, doc.Components.Messages["placementHealth"].Name)
	for _, m := range doc.Components.Messages {
		_, err := os.Stat("../docs/" + m.Payload.Ref)
		require.NoError(t, err)
	}
	text, err := os.ReadFile("../docs/events.md")
	require.NoError(t, err)
	_, after, ok := strings.Cut(string(text), "```json\n")
	require.True(t, ok)
	example, _, _ := strings.Cut(after, "```")
	e, err := placement.UnmarshalEvent([]byte(example))
	require.NoError(t, err)
	require.True(t, e.Serves())
	_, after, ok = strings.Cut(after, "```json\n")
	require.True(t, ok)
	example, _, _ = strings.Cut(after, "```")
	m, err := bus.UnmarshalAudit([]byte(example))
	require.NoError(t, err)
	require.Equal(t, m.Type, doc.Components.Messages["audit"].Name)
	require.NoError(t, validate(readSchema(t, "audit-v1.json"), decoded(t, []byte(example), nil), "event"))
	require.Equal(t, "opfield.audit.v1.workload.{workload}", doc.Channels["auditOfWorkload"].Address)
}
