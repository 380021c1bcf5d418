package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/api/apitest"
	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/bus/bustest"
	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

var update = flag.Bool("update", false, "rewrite testdata/ha-*.txt")

// fleet is an API with a policy engine that does what a test says.
type fleet struct {
	t        *testing.T
	policies *apitest.Policies
	server   *apitest.Server
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	p := apitest.NewPolicies("n1", "n2", "n3")
	p.Container("n1", "web-1", placement.Port{Port: 8080, Protocol: placement.ProtocolHTTP})
	p.Container("n2", "db")
	return &fleet{t: t, policies: p, server: apitest.Start(t, p, slog.New(slog.DiscardHandler))}
}

func (f *fleet) cli(args ...string) (code int, stdout, stderr string) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), soon)
	defer cancel()
	var out, talk bytes.Buffer
	code = run(ctx, append([]string{"--socket", f.server.Socket}, args...), &out, &talk)
	return code, out.String(), talk.String()
}

func (f *fleet) must(args ...string) string {
	f.t.Helper()
	code, out, talk := f.cli(args...)
	require.Zero(f.t, code, talk)
	return out
}

// refused runs a command that fails, and returns what it says.
func (f *fleet) refused(want int, args ...string) string {
	f.t.Helper()
	code, _, talk := f.cli(args...)
	require.Equal(f.t, want, code, talk)
	return talk
}

func (f *fleet) enabled(more ...string) {
	f.t.Helper()
	f.must(append([]string{"ha", "enable", "web", "--node", "n1", "--container", "web-1", "--mode", "failover"}, more...)...)
}

func (f *fleet) view() policy.View {
	f.t.Helper()
	v, ok := f.policies.Get("web")
	require.True(f.t, ok)
	return v
}

// golden compares with a file of testdata; times are not compared.
func golden(t *testing.T, name, got string) {
	t.Helper()
	got = regexp.MustCompile(`\d{4}-\d\d-\d\d \d\d:\d\d:\d\d`).ReplaceAllString(got, "YYYY-MM-DD hh:mm:ss")
	got = strings.ReplaceAll(got, "in 1h0m0s", "in 59m59s")
	got = regexp.MustCompile(`\d+h\d+m\d+s`).ReplaceAllString(got, "AGE") // since the fake's day
	got = regexp.MustCompile(`AGE  +`).ReplaceAllString(got, "AGE  ")
	got = regexp.MustCompile(`in 59m5\ds`).ReplaceAllString(got, "in AN HOUR")
	file := filepath.Join("testdata", "ha-"+name+".txt")
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), got, "go test ./cmd/opfield -run HA -update rewrites it")
}

func TestHA_EnableWithEveryFlag(t *testing.T) { // API-3, SET-1, SET-2
	f := newFleet(t)
	_, _, talk := f.cli("ha", "enable", "web", "--node", "n1", "--container", "web-1", "--port", "8080", "--port", "9000=grpc", "--mode", "replicated", "--replicas", "3",
		"--grace", "1m", "--max-unavailable", "1", "--max-surge", "0", "--drain", "0s", "--select", "n1,n2,n3", "--priority", "n2,n1", "--failback-delay", "10m", "--partition-mode", "available")
	require.Contains(t, talk, "accepted: enable web-1; see `opfield ha operations web --follow`")
	v := f.view()
	require.Equal(t, policy.Settings{
		Mode: policy.Replicated, Replicas: 3, ReplacementGraceSeconds: 60, MaxUnavailable: 1, Selection: policy.SelectedNodes, Nodes: []string{"n1", "n2", "n3"},
		PriorityMode: true, NodePriority: []string{"n2", "n1"}, FailbackDelaySeconds: 600, PartitionMode: policy.Available,
	}, v.Settings)
	require.Equal(t, []placement.Port{{Port: 8080, Protocol: "http"}, {Port: 9000, Protocol: "grpc"}}, v.Ports)

	f.must("ha", "update", "web", "--mode", "failover", "--node-selection", "all", "--no-priority", "--drain", "45s")
	want := policy.DefaultSettings(policy.Failover)
	want.ReplacementGraceSeconds, want.MaxUnavailable, want.MaxSurge, want.DrainSeconds = 60, 1, 0, 45
	want.FailbackDelaySeconds, want.PartitionMode = 600, policy.Available
	got := f.view().Settings
	require.Empty(t, got.NodePriority)
	got.NodePriority = nil
	require.Equal(t, want, got)
	f.must("ha", "update", "web", "-f", write(t, "drainSeconds: 7\nmaxSurge: 2\n"), "--max-surge", "3")
	require.Equal(t, 7, f.view().Settings.DrainSeconds)
	require.Equal(t, 3, f.view().Settings.MaxSurge, "flags win")
}

func TestHA_EnableFromFile(t *testing.T) { // API-3
	f := newFleet(t)
	file := write(t, `
workload: web
node: n1
container: web-1
ports: [{port: 8080}, {port: 5432, protocol: tcp}]
settings: {mode: failover, drainSeconds: 5, nodeSelection: selected, nodes: [n1, n2]}
`)
	var op policy.Operation
	require.NoError(t, json.Unmarshal([]byte(f.must("--json", "ha", "enable", "-f", file, "--drain", "6s")), &op))
	require.Equal(t, "web-1", op.ID)
	v := f.view()
	require.Equal(t, 6, v.Settings.DrainSeconds)
	require.Equal(t, []string{"n1", "n2"}, v.Settings.Nodes)
	require.Equal(t, []placement.Port{{Port: 8080, Protocol: "http"}, {Port: 5432, Protocol: "tcp"}}, v.Ports)
}

// Node and container of a labelled container are found by themselves.
func TestHA_FindsTheContainer(t *testing.T) { // API-3, DSC-3
	f := newFleet(t)
	conn := f.server.NATS.Conn(t, f.server.CA.Identity(t, identity.RoleNode, "n1"))
	bustest.Go(t, func(ctx context.Context) error {
		return conn.PublishInventory(ctx, func() (bus.Inventory, bool) {
			one := func(name, label string) bus.InventoryEntry {
				return bus.InventoryEntry{Name: name, Kind: placement.KindContainer, Containers: []bus.InventoryContainer{{Name: name, State: "running", Workload: label}}}
			}
			return bus.Inventory{Workloads: []bus.InventoryEntry{one("web-1", "web"), one("api-1", "api"), one("api-2", "api"), one("plain", "")}}, true
		})
	})
	require.Eventually(t, func() bool { return strings.Contains(f.must("workloads"), "plain") }, soon, poll)
	require.Contains(t, f.refused(exitFailed, "ha", "enable", "none", "--mode", "failover"), "no container found for workload none")
	require.Contains(t, f.refused(exitFailed, "ha", "enable", "api", "--mode", "failover"), "several containers fit workload api: api-1 on n1, api-2 on n1")
	require.Contains(t, f.refused(exitFailed, "ha", "enable", "--node", "n1", "--container", "plain", "--mode", "failover"), "AVAILABILITY_CONTAINER_UNKNOWN", "found, and named after itself")
	f.must("ha", "enable", "web", "--mode", "failover")
	require.Equal(t, policy.Original{Node: "n1", Container: "web-1"}, f.view().Original)
	require.Regexp(t, `(?m)^n1 +web-1 .* web \(failover\)$`, f.must("workloads"))
	require.Regexp(t, `(?m)^web +failover +1/1 +changing `, f.must("status"))
}

func TestHA_WrongUse(t *testing.T) { // API-3, SET-3
	f := newFleet(t)
	on := []string{"ha", "enable", "web", "--node", "n1", "--container", "web-1"}
	with := func(more ...string) []string { return append(append([]string{}, on...), more...) }
	for says, args := range map[string][]string{
		"--mode: want":                       on,
		"--mode must":                        with("--mode", "both"),
		"--drain: 1.5s":                      with("--mode", "failover", "--drain", "1.5s"),
		"--grace":                            with("--mode", "failover", "--grace", "soon"),
		"--failback-delay: 500ms":            with("--mode", "failover", "--failback-delay", "500ms"),
		`--port: "80=smtp"`:                  with("--mode", "failover", "--port", "80=smtp"),
		`--port: "0"`:                        with("--mode", "failover", "--port", "0"),
		`--port: "70000"`:                    with("--mode", "failover", "--port", "70000"),
		"--select: nodes":                    with("--mode", "failover", "--select", "n1", "--node-selection", "all"),
		"--wait":                             with("--mode", "failover", "--wait", "--no-wait"),
		"--replicas":                         with("--mode", "failover", "--replicas", "two"),
		"workload: want":                     {"ha", "enable", "--mode", "failover", "--node", "n1"},
		`there is no field "drainSecs" here`: {"ha", "enable", "-f", write(t, "workload: web\nsettings: {drainSecs: 5}\n")},
		"the file is empty":                  {"ha", "update", "web", "-f", write(t, "")},
		"want one YAML document":             {"ha", "update", "web", "-f", write(t, "drainSeconds: 1\n---\ndrainSeconds: 2\n")},
		"--survivor":                         {"ha", "disable", "web"},
		"--confirm: want":                    {"ha", "disable", "web", "--survivor", "n1"},
		"--env: number 2 is not":             {"ha", "rollout", "web", "--env", "A=1", "--env", "secret-value"},
		"--unset-env: want a name alone":     {"ha", "rollout", "web", "--unset-env", "A=secret-value"},
		"--memory":                           {"ha", "rollout", "web", "--memory", "much"},
		"--cpu":                              {"ha", "rollout", "web", "--cpu", "-1"},
		"expected \"<node>\"":                {"nodes", "drain"},
	} {
		talk := f.refused(exitUsage, args...)
		require.Contains(t, talk, says, args)
		require.NotContains(t, talk, "secret-value") // SEC-3
	}
	require.Empty(t, f.policies.List())
}

func TestHA_Refusals(t *testing.T) { // API-3, ELG-4, DIS-1
	f := newFleet(t)
	talk := f.refused(exitFailed, "ha", "enable", "web", "--node", "n1", "--container", "web-1", "--mode", "replicated", "--replicas", "1", "--max-surge", "40")
	require.Contains(t, talk, "opfield: replicas: 1 is outside of 2 to 32")
	require.Contains(t, talk, "opfield: maxSurge: 40 is outside of 0 to 32 (AVAILABILITY_SETTINGS_INVALID)")
	require.Contains(t, f.refused(exitFailed, "ha", "get", "web"), "AVAILABILITY_NOT_ENABLED")
	require.Contains(t, f.refused(exitFailed, "ha", "retry", "web"), "AVAILABILITY_NOT_ENABLED")

	f.policies.Find([]policy.Notice{{Code: policy.CodeMounts, Message: "volume data at /data"}}, []policy.Notice{{Code: policy.CodeRolloutCapacity, Message: "no room for one more copy"}})
	f.policies.Silence("n3")
	args := []string{"web", "--node", "n1", "--container", "web-1", "--mode", "failover", "--select", "n1,n3"}
	golden(t, "blocked", f.refused(exitFailed, append([]string{"ha", "enable"}, args...)...))
	code, out, talk := f.cli(append([]string{"ha", "check"}, args...)...)
	require.Equal(t, exitFailed, code)
	require.Contains(t, talk, "cannot be made available as things are")
	golden(t, "check-blocked", out)
	f.policies.Find(nil, nil)
	golden(t, "check", f.must(append([]string{"ha", "check"}, args...)...))
	require.Empty(t, f.policies.List())

	f.enabled()
	require.Contains(t, f.refused(exitFailed, "ha", "disable", "web", "--survivor", "n1", "--confirm", "wet"), "confirm: want the workload's name (AVAILABILITY_CONFIRMATION_REQUIRED)")
	require.Contains(t, f.refused(exitFailed, "ha", "retry", "web"), "no operation of web failed or waits")
	require.Contains(t, f.refused(exitFailed, "ha", "operations", "web", "web-7"), "no operation web-7")
	require.Contains(t, f.refused(exitFailed, "nodes", "remove", "n1"), "AVAILABILITY_NODE_IN_USE")
	require.Contains(t, f.refused(exitFailed, "nodes", "confirm-lost", "n2"), "AVAILABILITY_NODE_NOT_LOST")
}

func TestHA_Tables(t *testing.T) { // API-3, PRI-7
	f := newFleet(t)
	f.enabled("--priority", "n2,n1", "--drain", "10s")
	f.policies.Work("web", func(v *policy.View, op *policy.Operation) {
		op.Status, op.Phase, op.Progress, op.Attempts = policy.Waiting, policy.Starting, 50, 1
		op.Code, op.Message, op.Note = "AVAILABILITY_IMAGE_PULL", "registry did not answer", "waits for the image on n2"
		v.Health = policy.Degraded
		v.Warnings = []policy.Notice{{Code: policy.CodeFailbackSurge, Message: "failback needs maxSurge of at least 1"}}
		v.Problem = &policy.Problem{Code: "AVAILABILITY_NOT_READY", Message: "port 8080 refuses", Operation: "web-0", At: v.CreatedAt}
		v.Placements[0].Streams = 3
		v.Placements = append(v.Placements,
			policy.PlacementView{Node: "n2", NodeState: policy.NodeOnline, Want: placement.WantServing, Generation: 1, Container: "web.n2", State: placement.StateStarting, Reason: "health check is starting", Since: v.CreatedAt,
				Fault: &placement.Fault{Code: placement.CodeDaemonBusy, Message: "Docker did not answer"}},
			policy.PlacementView{Node: "n3", NodeState: policy.NodeOffline, Want: placement.WantPrepared, Generation: 1, Container: "web.n3", State: placement.StateRemoved, ImageReady: true, Since: v.CreatedAt})
	})
	f.must("ha", "restart", "web")
	golden(t, "get", f.must("ha", "get", "web"))
	golden(t, "list", f.must("ha", "list"))
	golden(t, "operations", f.must("ha", "operations", "web"))
	var v policy.View
	require.NoError(t, json.Unmarshal([]byte(f.must("--json", "ha", "get", "web")), &v))
	require.Equal(t, f.view(), v)
	var one policy.Operation
	require.NoError(t, json.Unmarshal([]byte(f.must("--json", "ha", "operations", "web", "web-2")), &one))
	require.Equal(t, policy.Restart, one.Type)
	require.Contains(t, f.must("ha", "operations", "web", "web-1"), "registry did not answer")
}

func TestHA_Rollout(t *testing.T) { // API-3, SEC-3
	f := newFleet(t)
	f.enabled()
	file := write(t, "image: web:2\nenv: {A: '1', PORT: 8080, GONE: null}\nlabels: {team: red}\nmemory: 1024\n")
	f.must("ha", "rollout", "web", "-f", file, "--image", "web:3", "--env", "A=x,y", "--env", "B=@"+write(t, "from the file\n"), "--env", "C=@@at",
		"--unset-env", "PORT", "--command", "serve", "--command=-a,b", "--label", "tier=1", "--memory", "512m", "--cpu", "1.5")
	str := func(s string) *string { return &s }
	memory, cpu := int64(512<<20), int64(1500)
	require.Equal(t, []policy.Change{{
		Image: "web:3", Env: map[string]*string{"A": str("x,y"), "B": str("from the file"), "C": str("@at"), "PORT": nil, "GONE": nil},
		Command: &[]string{"serve", "-a,b"}, Labels: map[string]*string{"team": str("red"), "tier": str("1")}, Memory: &memory, CPU: &cpu,
	}}, f.policies.Changes("web"))
	require.Contains(t, f.refused(exitFailed, "ha", "rollout", "web"), "AVAILABILITY_CHANGE_EMPTY")
	require.Contains(t, f.refused(exitFailed, "ha", "rollout", "web", "--env", "A=@/nowhere"), "--env A: ")
}

func TestHA_Verbs(t *testing.T) { // API-3, DIS-1, OPS-3
	f := newFleet(t)
	f.enabled()
	end := func(status policy.Status) {
		f.policies.Work("web", func(_ *policy.View, op *policy.Operation) { op.Status, op.Code = status, "AVAILABILITY_NOT_READY" })
	}
	end(policy.Failed)
	f.must("ha", "retry", "web") // the last that failed
	require.Equal(t, "retry of web-1", f.view().Operation.Reason)
	end(policy.Waiting)
	f.must("ha", "retry", "web") // or the one that waits
	require.Equal(t, policy.Pending, f.view().Operation.Status)
	end(policy.Completed)
	for _, verb := range []policy.Type{policy.Stop, policy.Start, policy.Restart} {
		f.must("ha", string(verb), "web")
		require.Equal(t, verb, f.view().Operation.Type)
		end(policy.Completed)
	}
	f.must("nodes", "drain", "n2")
	require.True(t, f.policies.Nodes()[1].Drained)
	f.must("nodes", "undrain", "n2")
	require.False(t, f.policies.Nodes()[1].Drained)
	f.must("nodes", "rename", "n2", "Rack 2")
	require.Equal(t, "Rack 2", f.policies.Name("n2"))
	f.policies.Silence("n2")
	f.must("nodes", "confirm-lost", "n2")
	require.True(t, f.policies.Lost("n2"))
	require.Equal(t, "{}\n", f.must("--json", "nodes", "remove", "n3"))
	require.Len(t, f.policies.Nodes(), 2)
	f.must("ha", "disable", "web", "--survivor", "n1", "--confirm", "web")
	require.Equal(t, "n1", f.view().Operation.Survivor)
}

// On a terminal the name is asked for.
func TestHA_DisableAsks(t *testing.T) { // DIS-1
	f := newFleet(t)
	f.enabled()
	screen, program := terminal(t)
	ask := func(answer string) error {
		_, err := screen.WriteString(answer + "\n")
		require.NoError(t, err)
		s := &session{ctx: t.Context(), client: newClient(f.server.Socket, io.Discard), in: program, out: io.Discard, talk: io.Discard}
		return (&haDisableCmd{Workload: "web", Survivor: "n1", waitFlags: waitFlags{NoWait: true}}).Run(s)
	}
	require.ErrorContains(t, ask("no"), "AVAILABILITY_CONFIRMATION_REQUIRED")
	require.NoError(t, ask("web"))
	require.Equal(t, policy.Disabling, f.view().Health)
}

func TestHA_WhileTheEngineStarts(t *testing.T) { // API-3
	server := apitest.Start(t, nil, slog.New(slog.DiscardHandler))
	f := &fleet{t: t, server: server}
	require.Contains(t, f.refused(exitFailed, "ha", "list"), "AVAILABILITY_ENGINE_UNAVAILABLE")
	f.must("workloads")
	f.must("status")
}

// until waits for a text in what a command prints.
func until(t *testing.T, b *syncBuffer, text string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(b.String(), text) }, soon, poll, text)
}

// start runs a command beside the test.
func (f *fleet) start(ctx context.Context, args ...string) (out, talk *syncBuffer, done chan int) {
	out, talk, done = &syncBuffer{}, &syncBuffer{}, make(chan int, 1)
	go func() { done <- run(ctx, append([]string{"--socket", f.server.Socket}, args...), out, talk) }()
	f.t.Cleanup(func() {
		select {
		case <-done:
		case <-time.After(soon):
			f.t.Error("the command did not end")
		}
	})
	return out, talk, done
}

func TestHA_ControllerNotReady(t *testing.T) { // API-3
	f := newFleet(t)
	f.enabled()
	f.policies.SetKnown(false)
	ready := time.AfterFunc(time.Second, func() { f.policies.SetKnown(true) })
	defer ready.Stop()
	code, out, talk := f.cli("ha", "get", "web")
	require.Zero(t, code, talk)
	require.Contains(t, out, "n1")
	require.Equal(t, 1, strings.Count(talk, "trying again"), talk)

	f.policies.SetKnown(false)
	begin := time.Now()
	talk = f.refused(exitFailed, "ha", "list")
	require.Contains(t, talk, "AVAILABILITY_CONTROLLER_NOT_READY")
	require.NotContains(t, talk, "NOT_ENABLED")
	require.GreaterOrEqual(t, time.Since(begin), readyWithin)
}

func TestAudit_List(t *testing.T) { // OBS-2, API-3
	f := newFleet(t)
	f.enabled()
	f.refused(exitFailed, "ha", "disable", "web", "--survivor", "n9", "--confirm", "web")
	require.Eventually(t, func() bool { return strings.Count(f.must("audit", "list", "--since", "1h"), "\n") == 2 }, soon, 20*time.Millisecond)
	out := f.must("audit", "list")
	require.Regexp(t, `(?m)^\S+ \S+  accepted   web +enable-availability of web, by uid \d+$`, out)
	require.Regexp(t, `(?m)^\S+ \S+  refused    web +POST /v1/availability/web/disable: AVAILABILITY_SURVIVOR_REQUIRED, by uid \d+$`, out)
	require.Empty(t, f.must("audit", "list", "--workload", "other"))
	f.refused(exitUsage, "audit", "list", "--since", "-1h")

	for line := range strings.Lines(f.must("--json", "audit", "list", "--workload", "web")) {
		var m bus.AuditMessage
		require.NoError(t, json.Unmarshal([]byte(line), &m))
		require.Equal(t, "workload.web", m.Subject)
	}

	ctx, cancel := context.WithCancel(t.Context())
	var followed syncBuffer
	done := make(chan int, 1)
	go func() {
		done <- run(ctx, []string{"--socket", f.server.Socket, "audit", "list", "--follow"}, &followed, io.Discard)
	}()
	require.Eventually(t, func() bool { return strings.Contains(followed.String(), "refused") }, soon, 10*time.Millisecond)
	f.must("ha", "stop", "web")
	require.Eventually(t, func() bool { return strings.Contains(followed.String(), "stop-workload of web") }, soon, 10*time.Millisecond)
	cancel()
	require.Zero(t, <-done)
	require.Equal(t, 1, strings.Count(followed.String(), "enable-availability"), "each once")
}
