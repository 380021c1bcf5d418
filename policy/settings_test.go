package policy_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// SET-1, SET-2, SET-3, MOD-1: every field with its range, name and code.
func TestSettings_Validate(t *testing.T) {
	type change = func(*policy.Settings)
	numbers := func(field string, set func(*policy.Settings, int), most int) map[string]change {
		out := map[string]change{}
		for _, n := range []int{-1, most + 1} {
			out[field+" "+time.Duration(n).String()] = func(s *policy.Settings) { set(s, n) }
		}
		for _, n := range []int{0, most} {
			s := policy.DefaultSettings(policy.Replicated)
			set(&s, n)
			require.Empty(t, s.Validate(), "%s %d", field, n)
		}
		return out
	}
	fields := map[string]struct {
		set  func(*policy.Settings, int)
		most int
	}{
		"replacementGraceSeconds": {func(s *policy.Settings, n int) { s.ReplacementGraceSeconds = n }, 3600},
		"maxUnavailable":          {func(s *policy.Settings, n int) { s.MaxUnavailable = n }, 32},
		"maxSurge":                {func(s *policy.Settings, n int) { s.MaxSurge = n }, 32},
		"drainSeconds":            {func(s *policy.Settings, n int) { s.DrainSeconds = n }, 3600},
		"failbackDelaySeconds":    {func(s *policy.Settings, n int) { s.FailbackDelaySeconds = n }, 3600},
	}
	for field, f := range fields {
		for name, c := range numbers(field, f.set, f.most) {
			s := policy.DefaultSettings(policy.Replicated)
			c(&s)
			wrong := s.Validate()
			require.Len(t, wrong, 1, name)
			require.Equal(t, field, wrong[0].Field)
			require.Equal(t, policy.CodeSettings, wrong[0].Code)
			require.Contains(t, wrong[0].Message, "0 to")
		}
	}
	for name, c := range map[string]struct {
		mode   policy.Mode
		change change
		field  string
		says   string
	}{
		"replicated 1":    {policy.Replicated, func(s *policy.Settings) { s.Replicas = 1 }, "replicas", "2 to 32"},
		"replicated 33":   {policy.Replicated, func(s *policy.Settings) { s.Replicas = 33 }, "replicas", "2 to 32"},
		"failover 2":      {policy.Failover, func(s *policy.Settings) { s.Replicas = 2 }, "replicas", "exactly 1"},
		"mode":            {policy.Failover, func(s *policy.Settings) { s.Mode = "ha" }, "mode", "replicated or failover"},
		"selection":       {policy.Failover, func(s *policy.Settings) { s.Selection = "some" }, "nodeSelection", "all or selected"},
		"nobody selected": {policy.Failover, func(s *policy.Settings) { s.Selection = policy.SelectedNodes }, "nodes", "no node is listed"},
		"all and nodes":   {policy.Failover, func(s *policy.Settings) { s.Nodes = []string{"a"} }, "nodes", "use selected"},
		"twice":           {policy.Failover, func(s *policy.Settings) { s.Selection, s.Nodes = policy.SelectedNodes, []string{"a", "b", "a"} }, "nodes[2]", "twice"},
		"name":            {policy.Failover, func(s *policy.Settings) { s.Selection, s.Nodes = policy.SelectedNodes, []string{"a", "B_"} }, "nodes[1]", "a-z"},
		"priority empty":  {policy.Failover, func(s *policy.Settings) { s.PriorityMode = true }, "nodePriority", "the primary first"},
		"priority twice":  {policy.Failover, func(s *policy.Settings) { s.PriorityMode, s.NodePriority = true, []string{"a", "a"} }, "nodePriority[1]", "twice"},
		"priority elsewhere": {policy.Failover, func(s *policy.Settings) {
			s.Selection, s.Nodes, s.NodePriority = policy.SelectedNodes, []string{"a"}, []string{"a", "b"}
		}, "nodePriority[1]", "not among the selected"},
		"partition": {policy.Failover, func(s *policy.Settings) { s.PartitionMode = "" }, "partitionMode", "strict or available"},
	} {
		t.Run(name, func(t *testing.T) {
			s := policy.DefaultSettings(c.mode)
			require.Empty(t, s.Validate())
			c.change(&s)
			wrong := s.Validate()
			require.Len(t, wrong, 1)
			require.Equal(t, policy.Violation{Code: policy.CodeSettings, Field: c.field, Message: wrong[0].Message}, wrong[0])
			require.Contains(t, wrong[0].Message, c.says)
		})
	}
	s := policy.DefaultSettings(policy.Replicated)
	require.Equal(t, []int{15, 0, 1, 30, 300, 2}, []int{s.ReplacementGraceSeconds, s.MaxUnavailable, s.MaxSurge, s.DrainSeconds, s.FailbackDelaySeconds, s.Replicas})
	require.Equal(t, policy.Strict, s.PartitionMode)
	require.False(t, s.PriorityMode)
	s.Replicas, s.MaxSurge = 0, -1
	require.Len(t, s.Validate(), 2, "everything that is wrong is said at once")
}

// running is a document that enabled well.
func running(t *testing.T, words string) *script {
	s := &script{t: t}
	lines(t, s, "nodes 4\nenable node-1 "+words+"\nuntil idle 1m")
	return s
}

// SET-3: what is not valid is refused, and nothing is stored.
func TestDocument_UpdateRefused(t *testing.T) {
	w := running(t, "mode=failover").w
	for _, c := range []struct {
		change func(*policy.Settings)
		code   policy.Code
		field  string
	}{
		{func(s *policy.Settings) { s.MaxSurge = -1 }, policy.CodeSettings, "maxSurge"},
		{func(s *policy.Settings) { s.Selection, s.Nodes = policy.SelectedNodes, []string{"node-2"} }, policy.CodeOriginNotSelected, "nodes"},
	} {
		doc := w.doc
		before := encode(doc)
		s := doc.Settings
		c.change(&s)
		_, refusal := doc.Update(w.now, s)
		require.NotNil(t, refusal)
		require.Equal(t, c.code, refusal.Code)
		require.Equal(t, c.field, refusal.Violations[0].Field)
		require.Equal(t, before, encode(doc))
	}
}

// A change of every kind, and what is refused. ROL-6: a change builds on the
// version that is asked for last.
func TestDocument_Rollout(t *testing.T) {
	text := func(s string) *string { return &s }
	number := func(n int64) *int64 { return &n }
	spec := `{"config":{"Cmd":["/old"],"Labels":{"a":"1","opfield.port":"80"}},"host":{"Memory":67108864},"env":["A=1","B=2","AB=3"]}`
	for name, c := range map[string]struct {
		change policy.Change
		field  string // of the refusal
		want   string // of the specification
		image  string
	}{
		"empty":               {policy.Change{}, "image", "", ""},
		"image":               {policy.Change{Image: "web:2"}, "", "", "web:2"},
		"image with a space":  {policy.Change{Image: "web: 2"}, "image", "", ""},
		"image as an option":  {policy.Change{Image: "--help"}, "image", "", ""},
		"set":                 {policy.Change{Env: map[string]*string{"A": text("x=y"), "C": text("")}}, "", `"env":["B=2","AB=3","A=x=y","C="]`, ""},
		"unset":               {policy.Change{Env: map[string]*string{"A": nil}}, "", `"env":["B=2","AB=3","A"]`, ""},
		"variable, no name":   {policy.Change{Env: map[string]*string{"": text("x")}}, "env", "", ""},
		"variable with =":     {policy.Change{Env: map[string]*string{"A=B": text("x")}}, "env", "", ""},
		"NUL in a variable":   {policy.Change{Env: map[string]*string{"A": text("\x00")}}, "env", "", ""},
		"command":             {policy.Change{Command: &[]string{"/new", "-v"}}, "", `"Cmd":["/new","-v"]`, ""},
		"no command":          {policy.Change{Command: &[]string{}}, "", `"Cmd":[]`, ""},
		"label":               {policy.Change{Labels: map[string]*string{"b": text("2"), "a": nil}}, "", `"Labels":{"b":"2","opfield.port":"80"}`, ""},
		"our label":           {policy.Change{Labels: map[string]*string{"opfield.workload": text("x")}}, "labels", "", ""},
		"our label, removed":  {policy.Change{Labels: map[string]*string{"opfield.port": nil}}, "labels", "", ""},
		"label, no name":      {policy.Change{Labels: map[string]*string{"": text("x")}}, "labels", "", ""},
		"memory":              {policy.Change{Memory: number(128 << 20)}, "", `"Memory":134217728`, ""},
		"no limit":            {policy.Change{Memory: number(0)}, "", `"Memory":0`, ""},
		"too little memory":   {policy.Change{Memory: number(1 << 20)}, "memory", "", ""},
		"negative memory":     {policy.Change{Memory: number(-1)}, "memory", "", ""},
		"CPU":                 {policy.Change{CPU: number(1500)}, "", `"NanoCpus":1500000000`, ""},
		"negative CPU":        {policy.Change{CPU: number(-1)}, "cpu", "", ""},
		"more than one thing": {policy.Change{Image: "web:3", CPU: number(1)}, "", `"NanoCpus":1000000`, "web:3"},
	} {
		t.Run(name, func(t *testing.T) {
			w := running(t, "mode=failover").w
			doc := w.doc
			doc.Versions[0].Spec = []byte(spec)
			before := encode(doc)
			op, refusal := doc.Rollout(w.now, c.change)
			if c.field != "" {
				require.NotNil(t, refusal)
				require.Equal(t, c.field, refusal.Violations[0].Field)
				require.Equal(t, before, encode(doc), "nothing is stored")
				return
			}
			require.Nil(t, refusal)
			next := doc.Versions[len(doc.Versions)-1]
			require.Equal(t, op.Target, next.Generation)
			require.Contains(t, string(next.Spec), c.want)
			require.Equal(t, spec, string(doc.Versions[0].Spec))
			if c.image != "" {
				require.Equal(t, c.image, next.Source)
				require.Empty(t, next.Image.Digest, "it is mirrored first")
			} else {
				require.Equal(t, doc.Versions[0].Image.Digest, next.Image.Digest, "the same image is not mirrored again")
			}
		})
	}
	w := running(t, "mode=failover").w
	doc := w.doc
	doc.Versions[0].Spec = []byte(spec)
	_, refusal := doc.Rollout(w.now, policy.Change{Env: map[string]*string{"A": text("first")}})
	require.Nil(t, refusal)
	_, refusal = doc.Rollout(w.now, policy.Change{Env: map[string]*string{"B": text("second")}})
	require.Nil(t, refusal)
	last := string(doc.Versions[len(doc.Versions)-1].Spec)
	require.True(t, strings.Contains(last, "A=first") && strings.Contains(last, "B=second"), last)
}

// DIS-1, DIS-3, OPS-3: requests that are refused, with their codes.
func TestDocument_Refusals(t *testing.T) {
	s := running(t, "mode=replicated replicas=2")
	doc := s.w.doc
	_, refusal := doc.Disable(s.w.now, policy.DisableRequest{Survivor: "node-1", Confirm: "Web"}, s.w.world())
	require.Equal(t, policy.CodeConfirmation, refusal.Code)
	_, refusal = doc.Disable(s.w.now, policy.DisableRequest{Survivor: "", Confirm: "web"}, s.w.world())
	require.Equal(t, policy.CodeSurvivor, refusal.Code)
	_, refusal = doc.Do(s.w.now, policy.Heal)
	require.Equal(t, policy.CodeChangeInvalid, refusal.Code)
	_, refusal = doc.Retry(s.w.now, "web-99")
	require.True(t, refusal.NotFound)
	_, refusal = doc.Retry(s.w.now, doc.History[0].ID)
	require.Equal(t, policy.CodeOperationNotFailed, refusal.Code)
	_, refusal = doc.Disable(s.w.now, policy.DisableRequest{Survivor: "node-1", Confirm: "web"}, s.w.world())
	require.Nil(t, refusal)
	for _, again := range []func() *policy.Refusal{
		func() *policy.Refusal { _, r := doc.Update(s.w.now, doc.Settings); return r },
		func() *policy.Refusal { _, r := doc.Rollout(s.w.now, policy.Change{Image: "web:2"}); return r },
		func() *policy.Refusal { _, r := doc.Do(s.w.now, policy.Stop); return r },
		func() *policy.Refusal {
			_, r := doc.Disable(s.w.now, policy.DisableRequest{Survivor: "node-2", Confirm: "web"}, s.w.world())
			return r
		},
	} {
		r := again()
		require.Equal(t, policy.CodeDisableInProgress, r.Code)
		require.True(t, r.Conflict)
	}
}

// PRI-7, STP-1, DIS-3: what is shown of a policy.
func TestShow(t *testing.T) {
	s := running(t, "mode=failover priority=node-1,node-2 delay=3600")
	view := func() policy.View { return policy.Show(s.w.doc, s.w.world()) }
	v := view()
	require.Equal(t, policy.Healthy, v.Health)
	require.Equal(t, []any{1, 1, "node-1", false}, []any{v.Serving, v.Wanted, v.Primary, v.OnBackup})
	require.Equal(t, []string{"node-1"}, v.ServingFrom)
	require.Equal(t, "sha256:image-1@sha256:image-1", v.Image)
	lines(t, s, "node-1 offline\nwait 8s")
	v = view()
	require.Equal(t, policy.Down, v.Health)
	require.Equal(t, "its node is offline", v.Placements[0].Reason)
	require.False(t, v.OnBackup)
	lines(t, s, "wait 10s")
	require.Equal(t, policy.Heal, view().Operation.Type)
	lines(t, s, "until idle 1m")
	v = view()
	require.Equal(t, policy.Healthy, v.Health)
	require.True(t, v.OnBackup)
	require.Equal(t, []string{"node-2"}, v.ServingFrom)
	lines(t, s, "settings mode=replicated replicas=3\nwait 2s")
	v = view()
	require.Equal(t, policy.Degraded, v.Health)
	require.Empty(t, v.Primary)
	require.Nil(t, v.ServingFrom, "shown with priority mode only")
	lines(t, s, "until idle 1m\nrollout env=2\nstop\nrestart")
	v = view()
	require.Equal(t, policy.Changing, v.Health)
	require.Len(t, v.Queued, 2)
	lines(t, s, "until idle 5m")
	v = view()
	require.Equal(t, policy.Stopped, v.Health)
	require.True(t, v.Stopped)
	require.Zero(t, v.Serving)
	require.Equal(t, placement.WantStopped, v.Placements[1].Want)
	require.False(t, strings.Contains(encode(v), "specification"))
}
