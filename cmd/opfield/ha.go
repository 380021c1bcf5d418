package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/opfield/availability/api"
	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

type haCmd struct {
	Check      haCheckCmd      `cmd:"" help:"Say whether a workload can be made available; nothing is changed."`
	Enable     haEnableCmd     `cmd:"" help:"Make a running container available on several nodes."`
	List       haListCmd       `cmd:"" help:"List available workloads."`
	Get        haGetCmd        `cmd:"" help:"Show one available workload."`
	Update     haUpdateCmd     `cmd:"" help:"Change settings; those that are not named stay."`
	Rollout    haRolloutCmd    `cmd:"" help:"Bring a new version to every copy."`
	Disable    haDisableCmd    `cmd:"" help:"Give the policy up and keep one placement."`
	Stop       haStopCmd       `cmd:"" help:"Stop every copy and keep it."`
	Start      haStartCmd      `cmd:"" help:"Start the copies that served last."`
	Restart    haRestartCmd    `cmd:"" help:"Restart the serving copies one after another."`
	Operations haOperationsCmd `cmd:"" help:"Show what was done, is done and will be done to a workload."`
	Retry      haRetryCmd      `cmd:"" help:"Try a failed or waiting operation again now."`
}

// settingsFlags are the settings that the command line names.
type settingsFlags struct {
	Mode           string         `help:"replicated: several copies serve. failover: one serves and is replaced after the loss of its node." enum:",replicated,failover" default:"" placeholder:"MODE"`
	Replicas       *int           `help:"Serving placements: 2 to 32 in replicated mode." placeholder:"N"`
	Grace          *time.Duration `help:"From the loss of a node to the start of a replacement: 0s to 1h." placeholder:"15s"`
	MaxUnavailable *int           `help:"Placements that a planned update may make unavailable at the same time: 0 to 32." placeholder:"N"`
	MaxSurge       *int           `help:"Temporary placements above the wanted number: 0 to 32." placeholder:"N"`
	Drain          *time.Duration `help:"From the end of new connections to the stop of a copy: 0s to 1h." placeholder:"30s"`
	NodeSelection  string         `help:"all: every compatible node. selected: those of --select." enum:",all,selected" default:"" placeholder:"all"`
	Select         []string       `help:"Only these nodes may have a copy." placeholder:"NODE"`
	Priority       []string       `help:"Prefer nodes in this order; the first is the primary." placeholder:"NODE"`
	NoPriority     bool           `name:"no-priority" help:"Prefer no node." xor:"priority"`
	FailbackDelay  *time.Duration `help:"How long a preferred node must be healthy before the workload returns to it: 0s to 1h." placeholder:"5m"`
	PartitionMode  string         `help:"strict: never two copies of a failover workload. available: both sides of a split may serve." enum:",strict,available" default:"" placeholder:"MODE"`
}

// onto writes what the flags name over c.
func (f settingsFlags) onto(c *api.SettingsChange) error {
	for _, d := range []struct {
		flag  string
		value *time.Duration
		field **int
	}{
		{"--grace", f.Grace, &c.ReplacementGraceSeconds},
		{"--drain", f.Drain, &c.DrainSeconds},
		{"--failback-delay", f.FailbackDelay, &c.FailbackDelaySeconds},
	} {
		if d.value == nil {
			continue
		}
		if *d.value%time.Second != 0 {
			return usageError(fmt.Sprintf("%s: %s; want whole seconds, such as 15s", d.flag, *d.value))
		}
		seconds := int(*d.value / time.Second)
		*d.field = &seconds
	}
	if f.NodeSelection == string(policy.AllNodes) && len(f.Select) > 0 {
		return usageError("--select: nodes are listed, but --node-selection is all; remove one of the two")
	}
	if f.NoPriority && len(f.Priority) > 0 {
		return usageError("--priority: nodes are listed, but --no-priority is given; remove one of the two")
	}
	put(&c.Mode, f.Mode != "", policy.Mode(f.Mode))
	put(&c.PartitionMode, f.PartitionMode != "", policy.Partition(f.PartitionMode))
	put(&c.Selection, f.NodeSelection != "", policy.Selection(f.NodeSelection))
	put(&c.Selection, len(f.Select) > 0, policy.SelectedNodes)
	put(&c.Nodes, len(f.Select) > 0, f.Select)
	put(&c.PriorityMode, len(f.Priority) > 0, true)
	put(&c.NodePriority, len(f.Priority) > 0, f.Priority)
	put(&c.PriorityMode, f.NoPriority, false)
	put(&c.NodePriority, f.NoPriority, []string{})
	for _, n := range []struct{ value, field **int }{{&f.Replicas, &c.Replicas}, {&f.MaxUnavailable, &c.MaxUnavailable}, {&f.MaxSurge, &c.MaxSurge}} {
		if *n.value != nil {
			*n.field = *n.value
		}
	}
	return nil
}

func put[T any](field **T, given bool, value T) {
	if given {
		*field = &value
	}
}

// orderFlags name a container and the settings of its policy.
type orderFlags struct {
	Workload  string   `arg:"" optional:"" help:"Name of the workload; default: the container's label, or its name."`
	File      string   `short:"f" help:"YAML file with workload, node, container, ports and settings; flags win." type:"existingfile"`
	Node      string   `help:"Node on which the container runs."`
	Container string   `help:"Name or id of the container there."`
	Port      []string `help:"Port that routes may lead to, such as 8080 or 9000=grpc; repeatable. Default: those of the label." placeholder:"PORT[=http|grpc|tcp]"`
	settingsFlags
}

// order returns the file with the flags over it.
func (f orderFlags) order() (api.EnableOrder, error) {
	var o api.EnableOrder
	if f.File != "" {
		if err := readYAML(f.File, &o); err != nil {
			return o, err
		}
	}
	for _, v := range []struct {
		flag  string
		field *string
	}{{f.Workload, &o.Workload}, {f.Node, &o.Node}, {f.Container, &o.Container}} {
		if v.flag != "" {
			*v.field = v.flag
		}
	}
	if len(f.Port) > 0 {
		o.Ports = nil
	}
	for _, text := range f.Port {
		p, err := parsePort(text)
		if err != nil {
			return o, err
		}
		o.Ports = append(o.Ports, p)
	}
	if err := f.onto(&o.Settings); err != nil {
		return o, err
	}
	if o.Settings.Mode == nil {
		return o, usageError("--mode: want replicated or failover")
	}
	if o.Workload == "" && o.Container == "" {
		return o, usageError("workload: want the workload's name, or --node and --container")
	}
	return o, nil
}

func parsePort(text string) (api.PortOrder, error) {
	number, protocol, named := strings.Cut(text, "=")
	n, err := strconv.ParseUint(number, 10, 16)
	p := api.PortOrder{Port: uint16(n), Protocol: placement.Protocol(protocol)}
	known := []placement.Protocol{placement.ProtocolHTTP, placement.ProtocolGRPC, placement.ProtocolTCP}
	if err != nil || n == 0 || named && !slices.Contains(known, p.Protocol) {
		return p, usageError(fmt.Sprintf("--port: %q; want a port, or a port with its protocol, such as 8080, 9000=grpc or 5432=tcp", text))
	}
	return p, nil
}

// readYAML reads one strict document.
func readYAML(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(v); err != nil {
		if errors.Is(err, io.EOF) {
			err = errors.New("the file is empty")
		}
		return usageError(fmt.Sprintf("-f %s: %s", path, yamlText(err)))
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		return usageError(fmt.Sprintf("-f %s: want one YAML document", path))
	}
	return nil
}

var (
	yamlField = regexp.MustCompile(`field (\S+) not found in type .*`)
	yamlType  = regexp.MustCompile("(cannot unmarshal .*) into (.*[. ].*)")
)

// yamlText says what is wrong in a file without the names of our types.
func yamlText(err error) string {
	wrong, ok := errors.AsType[*yaml.TypeError](err)
	if !ok {
		return err.Error()
	}
	lines := make([]string, len(wrong.Errors))
	for i, line := range wrong.Errors {
		line = yamlField.ReplaceAllString(line, `there is no field "$1" here`)
		lines[i] = yamlType.ReplaceAllString(line, "$1 into fields; want `name: value` lines")
	}
	return strings.Join(lines, "\n  ")
}

// locate finds out what the user did not say: the node and the container of a
// workload, or the name of a container's workload.
func locate(s *session, o *api.EnableOrder) error {
	if o.Workload != "" && o.Node != "" && o.Container != "" {
		return nil
	}
	var list api.WorkloadList
	if err := s.client.call(s.ctx, http.MethodGet, "/v1/workloads", nil, &list); err != nil {
		return err
	}
	type place struct{ node, container, label string }
	var labelled, named []place
	for _, w := range list.Workloads {
		for _, c := range w.Containers {
			p := place{w.Node, c.Name, c.Workload}
			switch {
			case o.Node != "" && o.Node != w.Node, o.Container != "" && o.Container != c.Name:
			case o.Workload == "" || o.Workload == c.Workload:
				labelled = append(labelled, p)
			case o.Container != "" || o.Workload == c.Name:
				named = append(named, p)
			}
		}
	}
	places := labelled
	if len(places) == 0 {
		places = named
	}
	switch len(places) {
	case 1:
		o.Node, o.Container = places[0].node, places[0].container
		if o.Workload == "" {
			o.Workload = places[0].label
		}
		if o.Workload == "" {
			o.Workload = o.Container
		}
		return nil
	case 0:
		if o.Workload == "" && o.Node != "" {
			return fmt.Errorf("no container found for %s; see `opfield workloads`, or name the workload to have the node asked", strings.Join(given(*o), ", "))
		}
		return fmt.Errorf("no container found for %s; see `opfield workloads`, and give --node and --container", strings.Join(given(*o), ", "))
	}
	if o.Workload != "" && s.client.call(s.ctx, http.MethodGet, at(o.Workload, ""), nil, nil) == nil {
		return fmt.Errorf("workload %s is available already; see `opfield ha get %s`, and change it with `opfield ha update` or `rollout`", o.Workload, o.Workload)
	}
	var where []string
	for _, p := range places {
		where = append(where, p.container+" on "+p.node)
	}
	return fmt.Errorf("several containers fit %s: %s; choose one with --node and --container", strings.Join(given(*o), ", "), strings.Join(where, ", "))
}

func given(o api.EnableOrder) []string {
	var out []string
	for _, v := range []struct{ what, value string }{{"workload", o.Workload}, {"node", o.Node}, {"container", o.Container}} {
		if v.value != "" {
			out = append(out, v.what+" "+v.value)
		}
	}
	return out
}

type haCheckCmd struct{ orderFlags }

func (c *haCheckCmd) Run(s *session) error {
	o, err := c.order()
	if err != nil {
		return err
	}
	if err := locate(s, &o); err != nil {
		return err
	}
	var e policy.Eligibility
	if err := s.client.call(s.ctx, http.MethodPost, "/v1/availability/check", o, &e); err != nil {
		return err
	}
	if s.json {
		err = s.printJSON(e)
	} else {
		err = printEligibility(s.out, e, o)
	}
	if err == nil && !e.OK() {
		err = fmt.Errorf("workload %s cannot be made available as things are", e.Workload)
	}
	return err
}

type haEnableCmd struct {
	orderFlags
	waitFlags
}

func (c *haEnableCmd) Run(s *session) error {
	o, err := c.order()
	if err != nil {
		return err
	}
	if err := locate(s, &o); err != nil {
		return err
	}
	return c.send(s, o.Workload, http.MethodPost, "/v1/availability", o)
}

type haUpdateCmd struct {
	Workload string `arg:"" help:"Name of the workload."`
	File     string `short:"f" help:"YAML file with settings, as in settings of ha enable -f; flags win." type:"existingfile"`
	settingsFlags
	waitFlags
}

func (c *haUpdateCmd) Run(s *session) error {
	var change api.SettingsChange
	if c.File != "" {
		if err := readYAML(c.File, &change); err != nil {
			return err
		}
	}
	if err := c.onto(&change); err != nil {
		return err
	}
	return c.send(s, c.Workload, http.MethodPatch, at(c.Workload, "/settings"), change)
}

func at(workload, tail string) string { return "/v1/availability/" + url.PathEscape(workload) + tail }

type haStopCmd struct {
	Workload string `arg:"" help:"Name of the workload."`
	waitFlags
}

func (c *haStopCmd) Run(s *session) error {
	return c.send(s, c.Workload, http.MethodPost, at(c.Workload, "/stop"), nil)
}

type haStartCmd struct {
	Workload string `arg:"" help:"Name of the workload."`
	waitFlags
}

func (c *haStartCmd) Run(s *session) error {
	return c.send(s, c.Workload, http.MethodPost, at(c.Workload, "/start"), nil)
}

type haRestartCmd struct {
	Workload string `arg:"" help:"Name of the workload."`
	waitFlags
}

func (c *haRestartCmd) Run(s *session) error {
	return c.send(s, c.Workload, http.MethodPost, at(c.Workload, "/restart"), nil)
}

type haDisableCmd struct {
	Workload string `arg:"" help:"Name of the workload."`
	Survivor string `help:"Node of the placement that is kept." required:"" placeholder:"NODE"`
	Confirm  string `help:"The workload's name; asked for on a terminal." placeholder:"WORKLOAD"`
	waitFlags
}

func (c *haDisableCmd) Run(s *session) error {
	if c.Confirm == "" {
		if !isTerminal(s.in) {
			return usageError("--confirm: want the workload's name, because every other placement is removed")
		}
		fmt.Fprintf(s.talk, "The placement on %s is kept, every other one is removed.\nType the workload's name to go on: ", c.Survivor)
		line, err := bufio.NewReader(s.in).ReadString('\n')
		if err != nil {
			return fmt.Errorf("read the confirmation: %w", err)
		}
		c.Confirm = strings.TrimSpace(line)
	}
	return c.send(s, c.Workload, http.MethodPost, at(c.Workload, "/disable"), api.DisableOrder{Survivor: c.Survivor, Confirm: c.Confirm})
}

type haRetryCmd struct {
	Workload string `arg:"" help:"Name of the workload."`
	ID       string `arg:"" optional:"" help:"Id of the operation; default: the last one that failed or waits."`
	waitFlags
}

func (c *haRetryCmd) Run(s *session) error {
	if c.ID == "" {
		var list api.OperationList
		if err := s.client.call(s.ctx, http.MethodGet, at(c.Workload, "/operations"), nil, &list); err != nil {
			return err
		}
		i := slices.IndexFunc(list.Operations, func(op policy.Operation) bool {
			return op.Status == policy.Failed || op.Status == policy.Waiting
		})
		if i < 0 {
			return fmt.Errorf("no operation of %s failed or waits; see `opfield ha operations %s`", c.Workload, c.Workload)
		}
		c.ID = list.Operations[i].ID
	}
	return c.send(s, c.Workload, http.MethodPost, at(c.Workload, "/operations/"+url.PathEscape(c.ID)+"/retry"), nil)
}
