package policy_test

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

var update = flag.Bool("update", false, "rewrite the output in testdata")

// TestScripts runs the scenarios in testdata. The first lines of each say what
// it proves. What follows a line of dashes is what happened and is rewritten by
// -update; a line that begins with "expect" holds in any case.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			got := runScript(t, string(text), nil)
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
				return
			}
			require.Equal(t, string(text), got)
		})
	}
}

const dashes = "----"

// runScript runs a scenario and returns it with its present output. prepare
// may change the world before it begins.
func runScript(t testing.TB, text string, prepare func(*scripted)) string {
	var out strings.Builder
	s := &script{t: t}
	inOutput, failed := false, false
	for number, line := range strings.Split(strings.TrimRight(text, "\n"), "\n") {
		switch {
		case line == dashes:
			inOutput = true
			out.WriteString(dashes + "\n")
			if s.w != nil {
				out.WriteString(s.w.out.String())
				s.w.out.Reset()
			}
			continue
		case inOutput && line != "":
			continue
		case inOutput:
			inOutput = false
		}
		out.WriteString(line + "\n")
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := s.command(strings.Fields(line), prepare); err != nil {
			t.Errorf("line %d: %s: %v", number+1, line, err)
			failed = true
		}
	}
	if failed && s.w != nil {
		t.Log(out.String() + s.w.out.String())
	}
	return out.String()
}

type script struct {
	t       testing.TB
	w       *scripted
	refusal *policy.Refusal
}

func (s *script) command(f []string, prepare func(*scripted)) error {
	w := s.w
	switch f[0] {
	case "nodes":
		n, _ := strconv.Atoi(f[1])
		s.w = newScripted(s.t, n)
		if prepare != nil {
			prepare(s.w)
		}
		return nil
	case "enable":
		return w.enable(f[1], f[2:])
	case "settings", "rollout", "stop", "start", "restart", "disable", "retry":
		return s.user(f)
	case "wait":
		d, err := time.ParseDuration(f[1])
		if err == nil {
			w.advance(d)
		}
		return err
	case "until":
		return w.until(f[1:])
	case "registry":
		w.registry = f[1] == "on"
	case "ingress":
		w.ingress = f[1] == "confirms"
	case "slot":
		w.slot = f[1] == "on"
	case "failing":
		w.failing[f[1]] = true
	case "mends":
		delete(w.failing, f[1])
		delete(w.broken, f[1])
	case "add":
		w.addNode(f[1])
	case "remove":
		delete(w.nodes, f[1])
		delete(w.observed, f[1])
		w.names = slices.DeleteFunc(w.names, func(n string) bool { return n == f[1] })
	case "controller":
		w.alive = f[1] != "dies"
		if w.alive {
			w.restartController()
		}
		return nil
	case "mark":
		w.mark()
		return nil
	case "show":
		w.show()
		return nil
	case "expect":
		if got := s.look(f[1:]); got != strings.Join(f[2:], " ") {
			return fmt.Errorf("got %q at %s", got, w.now.Sub(w.start))
		}
		return nil
	default:
		h := w.nodes[f[0]]
		if h == nil {
			return fmt.Errorf("there is no such command")
		}
		if err := h.set(f[1]); err != nil {
			return err
		}
	}
	w.say("%s", strings.Join(f, " "))
	if w.alive && w.exists {
		w.decide()
	}
	return nil
}

// set does something to a node.
func (h *host) set(what string) error {
	back := func() {
		h.healthy = h.w.now
		h.w.deliver()
	}
	key, value, _ := strings.Cut(what, "=")
	switch key {
	case "offline":
		h.up, h.lost = false, h.w.now
	case "online":
		h.up = true
		back()
	case "silent":
		h.nats = false
	case "reports":
		h.nats = true
		back()
	case "hangs":
		h.hang = true
	case "mute":
		h.mute = true
	case "speaks":
		h.mute = false
		back()
	case "answers":
		h.hang = false
		back()
	case "drain", "undrain":
		h.drained = key == "drain"
	case "sick", "well":
		h.sick = key == "sick"
	case "loops":
		h.sick, h.looping = true, true
	case "memory":
		n, err := strconv.ParseInt(value, 10, 64)
		h.memory = n << 20
		return err
	case "arch":
		h.arch = value
	case "platforms":
		h.platforms = strings.Split(value, ",")
	case "has":
		h.images["sha256:"+value] = true
	case "streams":
		n, err := strconv.Atoi(value)
		h.streams = n
		return err
	case "nopull":
		h.noPull["sha256:"+value] = true
	case "pulls":
		delete(h.noPull, "sha256:"+value)
		h.fault = nil
	case "loses":
		h.exists, h.running, h.gen, h.content = false, false, 0, ""
	case "crashes":
		h.running = false
	case "tampered":
		h.running = false
		h.tampered++
	case "forgets":
		h.tampered = 1 // a change after the agent lost its memory
	default:
		return fmt.Errorf("a node does not know %q", what)
	}
	return nil
}

// parseSettings changes settings by words such as surge=1.
func parseSettings(s policy.Settings, words []string) (policy.Settings, error) {
	for _, word := range words {
		key, value, _ := strings.Cut(word, "=")
		n, numeric := strconv.Atoi(value)
		list := strings.Split(value, ",")
		switch key {
		case "mode":
			s = policy.DefaultSettings(policy.Mode(value))
			continue
		case "nodes":
			s.Selection, s.Nodes = policy.SelectedNodes, list
			if value == "all" {
				s.Selection, s.Nodes = policy.AllNodes, nil
			}
			continue
		case "priority":
			s.PriorityMode, s.NodePriority = true, list
			continue
		case "replicas":
			s.Replicas = n
		case "surge":
			s.MaxSurge = n
		case "unavailable":
			s.MaxUnavailable = n
		case "grace":
			s.ReplacementGraceSeconds = n
		case "drain":
			s.DrainSeconds = n
		case "delay":
			s.FailbackDelaySeconds = n
		default:
			return s, fmt.Errorf("there is no setting %q", key)
		}
		if numeric != nil {
			return s, numeric
		}
	}
	return s, nil
}

// enable gives a running container a policy.
func (w *scripted) enable(node string, words []string) error {
	h := w.nodes[node]
	arch := h.arch
	settings, err := parseSettings(policy.DefaultSettings(policy.Failover), words)
	if err != nil {
		return err
	}
	for _, other := range w.nodes {
		other.known, other.desired, other.action = false, placement.Desired{}, nil
	}
	h.exists, h.running, h.gen, h.content, h.released, h.mirrorOf = true, true, 1, "1", false, ""
	c := placement.Captured{
		Node: node, Kind: placement.KindContainer, ID: "c0ffee", Name: "web", Running: true, ImageID: "sha256:image-1", Arch: arch, OS: "linux",
		Spec: []byte(`{}`), Memory: 64 << 20, RestartPolicy: "always",
	}
	e := policy.Preflight(policy.EnableRequest{
		Workload: w.workload, Node: node, Container: "web", Settings: settings, Ports: []placement.Port{{Port: 80, Protocol: placement.ProtocolHTTP}},
	}, policy.Subject{Captured: c, Nodes: w.world().Nodes})
	if !e.OK() {
		return fmt.Errorf("blocked: %v", e.Blockers)
	}
	w.doc, w.exists, w.observed = policy.NewDocument(w.now, e, c, 0), true, map[string]placement.Observed{}
	w.say("enabled on %s: %s", node, strings.Join(words, " "))
	w.mark()
	w.deliver()
	w.decide()
	return nil
}

// user asks for something.
func (s *script) user(f []string) error {
	w := s.w
	doc := w.doc
	var op policy.Operation
	s.refusal = nil
	switch f[0] {
	case "settings":
		settings, err := parseSettings(doc.Settings, f[1:])
		if err != nil {
			return err
		}
		op, s.refusal = doc.Update(w.now, settings)
	case "rollout":
		op, s.refusal = s.rollout(&doc, f[1:])
	case "disable":
		op, s.refusal = doc.Disable(w.now, policy.DisableRequest{Survivor: f[1], Confirm: "web"}, w.world())
	case "retry":
		op, s.refusal = doc.Retry(w.now, strings.Join(f[1:], ""))
	default:
		op, s.refusal = doc.Do(w.now, policy.Type(f[0]))
	}
	if s.refusal != nil {
		w.say("%s: refused: %v", strings.Join(f, " "), s.refusal)
		return nil
	}
	w.say("%s: %s", strings.Join(f, " "), op.ID)
	w.doc = doc
	if w.alive {
		w.decide()
	}
	return nil
}

func (s *script) rollout(doc *policy.Document, words []string) (policy.Operation, *policy.Refusal) {
	change := policy.Change{}
	broken := false
	for _, word := range words {
		key, value, _ := strings.Cut(word, "=")
		switch key {
		case "image":
			change.Image = value
		case "env":
			change.Env = map[string]*string{"V": &value}
		case "memory":
			n, _ := strconv.ParseInt(value, 10, 64)
			n <<= 20
			change.Memory = &n
		case "broken":
			broken = true
		}
	}
	op, refusal := doc.Rollout(s.w.now, change)
	for _, v := range doc.Versions {
		if refusal == nil && v.Generation == op.Target {
			s.w.versions = append(s.w.versions, v.Content)
			s.w.broken[v.Content] = broken
		}
	}
	return op, refusal
}

// until waits for something of the operations: "idle 5m", or a type with a
// status or phase such as "rollout draining 5m".
func (w *scripted) until(f []string) error {
	limit, err := time.ParseDuration(f[len(f)-1])
	if err != nil {
		return err
	}
	so := func() bool {
		if f[0] == "idle" {
			return len(w.doc.Operations) == 0 || !w.exists
		}
		return slices.ContainsFunc(w.doc.Operations, func(op policy.Operation) bool {
			return string(op.Type) == f[0] && (string(op.Status) == f[1] || string(op.Phase) == f[1])
		})
	}
	for end := w.now.Add(limit); !so(); {
		if !w.now.Before(end) {
			return fmt.Errorf("not so within %v\n%s", limit, w.out.String())
		}
		w.advance(tick)
	}
	return nil
}

func (w *scripted) hosts(which func(*host) bool) string {
	var out []string
	for _, id := range w.names {
		if which(w.nodes[id]) {
			out = append(out, id)
		}
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, ",")
}

// look returns what an expectation is about.
func (s *script) look(f []string) string {
	w := s.w
	view := policy.Show(w.doc, w.world())
	ops := func(all []policy.Operation, n int) string {
		var out []string
		for _, op := range all[:min(n, len(all))] {
			out = append(out, string(op.Type)+":"+string(op.Status))
		}
		if len(out) == 0 {
			return "none"
		}
		return strings.Join(out, ",")
	}
	words := 0
	if len(f) > 1 {
		words = len(strings.Split(f[1], ","))
	}
	placements := func(text func(policy.Placement) string) string {
		all := map[string]string{}
		for _, p := range w.doc.Placements {
			all[p.Node] = p.Node + "=" + text(p)
		}
		return strings.Join(slices.Collect(func(yield func(string) bool) {
			for _, k := range slices.Sorted(maps.Keys(all)) {
				if !yield(all[k]) {
					return
				}
			}
		}), ",")
	}
	switch f[0] {
	case "serving":
		return w.hosts((*host).serves)
	case "running":
		return w.hosts(func(h *host) bool { return h.exists && h.running })
	case "containers":
		return w.hosts(func(h *host) bool { return h.exists })
	case "health":
		return string(view.Health)
	case "operations":
		return ops(w.doc.Operations, 99)
	case "history":
		return ops(w.doc.History, words)
	case "problem":
		if view.Problem == nil {
			return "none"
		}
		return string(view.Problem.Code)
	case "code":
		return string(w.doc.Operations[0].Code)
	case "fewest":
		return strconv.Itoa(w.fewest)
	case "most":
		return strconv.Itoa(w.most)
	case "created":
		return strconv.Itoa(w.created)
	case "restarts":
		return strconv.Itoa(w.restarts)
	case "members":
		m, routed := w.doc.Members()
		if !routed {
			return "not routed"
		}
		return memberText(m)
	case "wants":
		return placements(func(p policy.Placement) string { return string(p.Want) })
	case "contents":
		return w.contents()
	case "primary":
		return fmt.Sprintf("%s from %s on backup %t", view.Primary, strings.Join(view.ServingFrom, ","), view.OnBackup)
	case "refused":
		if s.refusal == nil {
			return "nothing"
		}
		return string(s.refusal.Code)
	case "warnings":
		out := []string{}
		for _, n := range view.Warnings {
			out = append(out, string(n.Code))
		}
		return cmpOr(strings.Join(out, ","), "none")
	case "digests":
		return strings.Join(w.doc.Digests(), ",")
	case "exists":
		return strconv.FormatBool(w.exists)
	case "result":
		return w.doc.History[0].Result
	case "attempts":
		return strconv.Itoa(w.doc.Operations[0].Attempts)
	case "slots":
		_, running, wants := w.doc.Claim(w.now)
		return fmt.Sprintf("has %t wants %t", running, wants)
	}
	return "unknown expectation " + f[0]
}

func cmpOr(a, b string) string {
	if a == "" {
		return b
	}
	return a
}

func memberText(m placement.Members) string {
	var out []string
	for _, p := range m.Placements {
		text := p.Node
		if p.Closed {
			text += "(closed)"
		}
		out = append(out, text)
	}
	return cmpOr(strings.Join(out, ","), "none")
}

// contents is the version that each container is of.
func (w *scripted) contents() string {
	var out []string
	for _, id := range w.names {
		if h := w.nodes[id]; h.exists {
			out = append(out, id+"="+w.label(h.content))
		}
	}
	return cmpOr(strings.Join(out, ","), "none")
}

// label is the place of a version in the order they were asked for.
func (w *scripted) label(content string) string {
	return fmt.Sprintf("v%d", slices.Index(w.versions, content)+1)
}

// show writes everything of the policy.
func (w *scripted) show() {
	world := w.world()
	view := policy.Show(w.doc, world)
	w.say("%s, %d of %d serve, generation %d", view.Health, view.Serving, view.Wanted, view.Version)
	for _, op := range w.doc.Operations {
		next := ""
		if !op.Next.IsZero() {
			next = fmt.Sprintf(", next in %v", op.Next.Sub(w.now))
		}
		w.say("  %s %s %s, %s, %d %%, %d attempts failed%s: %s", op.ID, op.Type, op.Status, op.Phase, op.Progress, op.Attempts, next,
			strings.TrimSpace(fmt.Sprintf("%s %s %s", op.Code, op.Message, op.Note)))
	}
	for _, p := range view.Placements {
		h := w.nodes[p.Node]
		text := ""
		if p.Original {
			text += ", original"
		}
		if p.Suspended {
			text += ", suspended"
		}
		if h != nil && h.exists {
			text += fmt.Sprintf("; container of %s", w.label(h.content))
		}
		w.say("  %s %s, generation %d, %s, ready %t%s", p.Node, p.Want, p.Generation, cmpOr(string(p.State), "unknown"), p.Ready, text)
	}
	if m, routed := w.doc.Members(); routed {
		w.say("  members: %s", memberText(m))
	}
	if view.Problem != nil {
		w.say("  problem: %s %s", view.Problem.Code, view.Problem.Message)
	}
	if len(w.doc.History) > 0 {
		op := w.doc.History[0]
		w.say("  last: %s %s %s", op.Type, op.Status, cmpOr(op.Message, op.Result))
		for _, step := range op.Steps {
			w.say("    %v %s", step.At.Sub(w.start), step.Name)
		}
	}
	plan := policy.Decide(w.now, w.doc, world)
	if plan.Next.IsZero() {
		w.say("  looked at again when something happens")
	} else {
		w.say("  looked at again in %v", plan.Next.Sub(w.now))
	}
}
