package main

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

type haListCmd struct{}

func (haListCmd) Run(s *session) error {
	var list api.PolicyList
	if err := s.client.call(s.ctx, http.MethodGet, "/v1/availability", nil, &list); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(list)
	}
	return table(s.out, policyRows(list.Policies))
}

// policyRows has one line for each policy.
func policyRows(all []policy.View) [][]string {
	rows := [][]string{{"WORKLOAD", "MODE", "SERVING", "HEALTH", "PRIMARY", "SERVES FROM", "OPERATION", "PROBLEM"}}
	for _, v := range all {
		operation, problem := "", ""
		if v.Operation != nil {
			operation = v.Operation.ID + ": " + summary(*v.Operation)
		}
		if v.Problem != nil {
			problem = fmt.Sprintf("%s (%s)", v.Problem.Message, v.Problem.Code)
		}
		rows = append(rows, []string{v.Workload, string(v.Settings.Mode), serving(v), string(v.Health), v.Primary, servesFrom(v), operation, problem})
	}
	return rows
}

func serving(v policy.View) string { return fmt.Sprintf("%d/%d", v.Serving, v.Wanted) }

// servesFrom names the nodes that serve, and says so while a backup does.
// (PRI-7)
func servesFrom(v policy.View) string {
	nodes := v.ServingFrom
	if len(nodes) == 0 {
		for _, p := range v.Placements {
			if p.Want == placement.WantServing && p.Ready {
				nodes = append(nodes, p.Node)
			}
		}
	}
	out := strings.Join(nodes, " ")
	if v.OnBackup {
		out = strings.TrimSpace(out + " (On backup)")
	}
	return out
}

// summary says in a few words how far an operation is.
func summary(op policy.Operation) string {
	out := []string{string(op.Type) + " " + strings.ReplaceAll(string(op.Status), "_", " ")}
	if !op.Status.Over() {
		out = append(out, phaseName(op.Phase), strconv.Itoa(op.Progress)+" %")
	}
	if op.RolledBack {
		out = append(out, "rolling back")
	}
	return strings.Join(out, ", ")
}

func phaseName(p policy.Phase) string { return strings.ReplaceAll(string(p), "_", " ") }

type haGetCmd struct {
	Workload string `arg:"" help:"Name of the workload."`
}

func (c *haGetCmd) Run(s *session) error {
	var v policy.View
	if err := s.client.call(s.ctx, http.MethodGet, at(c.Workload, ""), nil, &v); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(v)
	}
	return printPolicy(s.out, v)
}

func printPolicy(w io.Writer, v policy.View) error {
	rows := [][]string{
		{"Workload", v.Workload + " (" + string(v.Kind) + ")"},
		{"Mode", string(v.Settings.Mode) + modeDetail(v.Settings)},
		{"Health", string(v.Health)},
		{"Serving", serving(v)},
	}
	if v.Primary != "" {
		rows = append(rows, []string{"Primary", v.Primary})
	}
	rows = append(rows, []string{"Serves from", servesFrom(v)},
		[]string{"Image", imageOf(v)},
		[]string{"Generation", strconv.FormatUint(v.Version, 10)},
		[]string{"Ports", ports(v.Ports)},
		[]string{"Nodes", nodesOf(v.Settings)},
		[]string{"Updates", fmt.Sprintf("at most %d unavailable, %d in addition, %s to drain", v.Settings.MaxUnavailable, v.Settings.MaxSurge, seconds(v.Settings.DrainSeconds))},
		[]string{"Node loss", "replaced after " + seconds(v.Settings.ReplacementGraceSeconds)},
		[]string{"Original", v.Original.Container + " on " + v.Original.Node})
	if op := v.Operation; op != nil {
		rows = append(rows, []string{"Operation", op.ID + ": " + summary(*op)})
		if op.Note != "" {
			rows = append(rows, []string{"", op.Note})
		}
	}
	for _, op := range v.Queued {
		rows = append(rows, []string{"Queued", op.ID + ": " + string(op.Type)})
	}
	if p := v.Problem; p != nil {
		rows = append(rows, []string{"Problem", fmt.Sprintf("%s (%s), operation %s at %s", p.Message, p.Code, p.Operation, when(p.At))})
	}
	for _, n := range v.Warnings {
		rows = append(rows, []string{"Warning", fmt.Sprintf("%s (%s)", n.Message, n.Code)})
	}
	for i := range rows { // table shows an empty cell as "-"
		if rows[i][0] == "" {
			rows[i][0] = " "
		}
	}
	if err := table(w, rows); err != nil {
		return err
	}
	fmt.Fprintln(w)
	return table(w, placementRows(v.Placements, time.Now()))
}

func modeDetail(s policy.Settings) string {
	if s.Mode == policy.Failover {
		return ", partition mode " + string(s.PartitionMode)
	}
	return fmt.Sprintf(", %d placements", s.Replicas)
}

func nodesOf(s policy.Settings) string {
	out := "all compatible"
	if s.Selection == policy.SelectedNodes {
		out = strings.Join(s.Nodes, " ")
	}
	if s.PriorityMode {
		out += ", in the order " + strings.Join(s.NodePriority, " ") + ", back after " + seconds(s.FailbackDelaySeconds)
	}
	return out
}

func seconds(n int) string { return (time.Duration(n) * time.Second).String() }

func ports(all []placement.Port) string {
	var out []string
	for _, p := range all {
		out = append(out, fmt.Sprintf("%d/%s", p.Port, p.Protocol))
	}
	return strings.Join(out, " ")
}

func placementRows(all []policy.PlacementView, now time.Time) [][]string {
	rows := [][]string{{"NODE", "NODE STATE", "WANTED", "GENERATION", "CONTAINER", "STATE", "STREAMS", "AGE", "REASON"}}
	for _, p := range all {
		container := p.Container
		if p.Original {
			container += " (original)"
		}
		rows = append(rows, []string{
			p.Node, string(p.NodeState), string(p.Want), strconv.FormatUint(p.Generation, 10), container, placementWord(p), strconv.Itoa(p.Streams),
			ageAt(p.Since, now), placementReason(p),
		})
	}
	return rows
}

func ageAt(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	return max(0, now.Sub(t)).Round(time.Second).String()
}

// placementWord says what the placement is in one word or two.
func placementWord(p policy.PlacementView) string {
	switch {
	case p.Suspended:
		return "suspended"
	case p.State == placement.StateRunning && p.Ready:
		return "ready"
	case p.State == placement.StateRunning:
		return "not ready"
	case p.State == placement.StateRemoved && p.Want == placement.WantPrepared && p.ImageReady:
		return "image ready"
	case p.State == placement.StateRemoved:
		return "no container"
	case p.State == "":
		return "not reported"
	default:
		return string(p.State)
	}
}

// placementReason says each thing once: the node's own reason repeats its fault.
func placementReason(p policy.PlacementView) string {
	var out []string
	reason := p.Reason
	if p.Fault != nil {
		out = append(out, fmt.Sprintf("%s (%s)", p.Fault.Message, p.Fault.Code))
		reason = strings.ReplaceAll(reason, p.Fault.Message, "")
	}
	for _, text := range append(strings.Split(reason, "; "), p.Outside) {
		if text != "" && !slices.Contains(out, text) {
			out = append(out, text)
		}
	}
	return strings.Join(out, "; ")
}

// imageOf shows an image that came by its id as what pulls it from the
// internal registry: an id and a digest together are no reference.
func imageOf(v policy.View) string {
	id, digest, pinned := strings.Cut(v.Image, "@")
	if hex, isID := strings.CutPrefix(id, "sha256:"); isID && pinned {
		return fmt.Sprintf("%s@%s (image id %s)", v.Workload, digest, hex[:min(len(hex), 12)])
	}
	return v.Image
}

type haOperationsCmd struct {
	Workload string `arg:"" help:"Name of the workload."`
	ID       string `arg:"" optional:"" help:"Id of the operation to show; with --follow, default: the one at work."`
	Follow   bool   `short:"f" help:"Show the progress of an operation until it is over."`
}

func (c *haOperationsCmd) Run(s *session) error {
	var list api.OperationList
	if err := s.client.call(s.ctx, http.MethodGet, at(c.Workload, "/operations"), nil, &list); err != nil {
		return err
	}
	if c.ID == "" && !c.Follow {
		if s.json {
			return s.printJSON(list)
		}
		return table(s.out, operationRows(list.Operations))
	}
	i := slices.IndexFunc(list.Operations, func(op policy.Operation) bool {
		return op.ID == c.ID || c.ID == "" && !op.Status.Over()
	})
	switch {
	case i < 0 && c.ID == "":
		s.say("no operation of %s is at work", c.Workload)
		return nil
	case i < 0:
		return fmt.Errorf("workload %s has no operation %s; see `opfield ha operations %s`", c.Workload, c.ID, c.Workload)
	case c.Follow:
		return s.follow(c.Workload, list.Operations[i])
	case s.json:
		return s.printJSON(list.Operations[i])
	}
	return printOperation(s.out, list.Operations[i])
}

func operationRows(all []policy.Operation) [][]string {
	rows := [][]string{{"OPERATION", "TYPE", "STATUS", "PHASE", "PROGRESS", "FAILED ATTEMPTS", "CREATED", "FINISHED", "RESULT"}}
	for _, op := range all {
		phase := ""
		if !op.Status.Over() {
			phase = phaseName(op.Phase)
		}
		rows = append(rows, []string{
			op.ID, string(op.Type), strings.ReplaceAll(string(op.Status), "_", " "), phase, strconv.Itoa(op.Progress) + " %", strconv.Itoa(op.Attempts),
			when(op.CreatedAt), when(op.FinishedAt), outcome(op),
		})
	}
	return rows
}

// outcome is what became of an operation, or what it waits for.
func outcome(op policy.Operation) string {
	var out []string
	if op.Message != "" {
		out = append(out, fmt.Sprintf("%s (%s)", op.Message, op.Code))
	}
	if op.RolledBack {
		out = append(out, "rolled back")
	}
	for _, text := range []string{op.Result, op.Note} {
		if text != "" {
			out = append(out, text)
		}
	}
	if len(out) == 0 {
		out = append(out, op.Reason)
	}
	return strings.Join(out, "; ")
}

// printOperation shows everything that one operation did.
func printOperation(w io.Writer, op policy.Operation) error {
	if err := table(w, operationRows([]policy.Operation{op})); err != nil {
		return err
	}
	for _, step := range op.Steps {
		fmt.Fprintf(w, "%s  %s\n", when(step.At), printable(step.Name))
	}
	return nil
}

// printEligibility shows what a preflight found, and every node.
func printEligibility(w io.Writer, e policy.Eligibility, o api.EnableOrder) error {
	printNotices(w, "BLOCKED", e.Blockers)
	printNotices(w, "WARNING", e.Warnings)
	if e.OK() {
		fmt.Fprintf(w, "workload %s can be made available: container %s on %s, %s%s\n",
			printable(e.Workload), printable(o.Container), printable(o.Node), e.Settings.Mode, modeDetail(e.Settings))
	}
	if len(e.Ports) > 0 {
		fmt.Fprintf(w, "ports %s\n", ports(e.Ports))
	}
	fmt.Fprintln(w)
	rows := [][]string{{"NODE", "ELIGIBLE", "FREE CPU", "FREE MEMORY", "REASON"}}
	for _, n := range e.Nodes {
		eligible := "no"
		if n.Eligible {
			eligible = "yes"
		}
		node := n.Node
		if n.Origin {
			node += " (origin)"
		}
		reason := n.Message
		if n.Reason != "" {
			reason = strings.TrimSpace(fmt.Sprintf("%s (%s)", reason, n.Reason))
		}
		rows = append(rows, []string{node, eligible, fmt.Sprintf("%.2f", float64(n.FreeCPU)/1000), fmt.Sprintf("%d MiB", n.FreeMemory>>20), reason})
	}
	return table(w, rows)
}

func printNotices(w io.Writer, word string, all []policy.Notice) {
	for _, n := range all {
		fmt.Fprintf(w, "%s %s (%s)\n", word, printable(n.Message), n.Code)
	}
}

// managed says which containers are placements, by node and name.
func managed(all []policy.View) map[[2]string]string {
	out := map[[2]string]string{}
	for _, v := range all {
		for _, p := range v.Placements {
			out[[2]string{p.Node, p.Container}] = v.Workload + " (" + string(v.Settings.Mode) + ")"
		}
	}
	return out
}

// nodeTitle is the id of a node, with the name that an operator gave it.
func nodeTitle(n api.NodeView) string {
	if n.Name != "" && n.Name != n.ID {
		return n.ID + " (" + n.Name + ")"
	}
	return n.ID
}

// nodeState says whether an operator took the node out of use.
func nodeState(n api.NodeView) string {
	if n.Drained {
		return string(n.State) + ", drained"
	}
	return string(n.State)
}
