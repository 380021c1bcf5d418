package policy_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// subject is a container on node-1 of three good nodes.
func subject() policy.Subject {
	s := policy.Subject{
		Captured: placement.Captured{
			Node: "node-1", Kind: placement.KindContainer, ID: "c0ffee", Name: "web", Running: true, ImageID: "sha256:image-1", Arch: "amd64", OS: "linux",
			CPU: 500, Memory: 256 << 20, Spec: []byte(`{}`), RestartPolicy: "always",
			Published: []placement.PublishedPort{{Address: "10.0.0.1", Port: 8080, Container: 80, Transport: "tcp"}},
		},
		Nodes: map[string]policy.Node{},
	}
	for _, id := range []string{"node-1", "node-2", "node-3"} {
		s.Nodes[id] = policy.Node{ID: id, State: policy.NodeOnline, Known: true, Facts: placement.NodeFacts{
			Arch: "amd64", OS: "linux", Docker: "20.10", CPU: 4000, Memory: 4 << 30,
		}}
	}
	return s
}

func request() policy.EnableRequest {
	return policy.EnableRequest{
		Workload: "web", Node: "node-1", Container: "web", Ports: []placement.Port{{Port: 80, Protocol: placement.ProtocolHTTP}},
		Settings: policy.DefaultSettings(policy.Failover),
	}
}

func codes(notices []policy.Notice) []policy.Code {
	out := []policy.Code{}
	for _, n := range notices {
		out = append(out, n.Code)
	}
	return out
}

// ELG-1, ELG-2, ELG-4, ELG-6: every blocker has its code and field.
func TestPreflight_Blockers(t *testing.T) {
	replicated := func(n int) policy.Settings {
		s := policy.DefaultSettings(policy.Replicated)
		s.Replicas = n
		return s
	}
	selected := func(s policy.Settings, nodes ...string) policy.Settings {
		s.Selection, s.Nodes = policy.SelectedNodes, nodes
		return s
	}
	for name, c := range map[string]struct {
		change func(*policy.EnableRequest, *policy.Subject)
		code   policy.Code
		field  string
		says   string
	}{
		"exists":            {func(_ *policy.EnableRequest, s *policy.Subject) { s.Exists = true }, policy.CodeExists, "workload", "has a policy already"},
		"name":              {func(r *policy.EnableRequest, _ *policy.Subject) { r.Workload = "Web_1" }, policy.CodeWorkloadName, "workload", "a-z"},
		"no name":           {func(r *policy.EnableRequest, _ *policy.Subject) { r.Workload = "" }, policy.CodeWorkloadName, "workload", "empty"},
		"other name":        {func(_ *policy.EnableRequest, s *policy.Subject) { s.Captured.Workload = "shop" }, policy.CodeWorkloadName, "workload", `"shop"`},
		"managed":           {func(_ *policy.EnableRequest, s *policy.Subject) { s.Captured.Owned = "shop.node-1" }, policy.CodePlacementManaged, "container", "shop.node-1"},
		"compose":           {func(_ *policy.EnableRequest, s *policy.Subject) { s.Captured.Compose = "shop" }, policy.CodeKind, "container", "Compose project shop"},
		"no port":           {func(r *policy.EnableRequest, _ *policy.Subject) { r.Ports = nil }, policy.CodePorts, "ports", "--port"},
		"not running":       {func(_ *policy.EnableRequest, s *policy.Subject) { s.Captured.Running = false }, policy.CodeOriginNotRunning, "container", "web does not run"},
		"setting of docker": {func(_ *policy.EnableRequest, s *policy.Subject) { s.Captured.Unsupported = []string{"privileged"} }, policy.CodeUnsupported, "container", "privileged"},
		"settings":          {func(r *policy.EnableRequest, _ *policy.Subject) { r.Settings.MaxSurge = 33 }, policy.CodeSettings, "maxSurge", "0 to 32"},
		"bind mount": {func(_ *policy.EnableRequest, s *policy.Subject) {
			s.Captured.Mounts = []placement.Mount{{Type: "bind", Source: "/srv", Destination: "/data", ReadOnly: true, From: "configuration"}}
		}, policy.CodeMounts, "mounts", "bind /srv at /data (read-only), by its configuration"},
		"volume of the image": {func(_ *policy.EnableRequest, s *policy.Subject) {
			s.Captured.Mounts = []placement.Mount{{Type: "anonymous volume", Destination: "/data", From: "image"}}
		}, policy.CodeMounts, "mounts", "anonymous volume at /data, by its image"},
		"one node": {func(_ *policy.EnableRequest, s *policy.Subject) {
			delete(s.Nodes, "node-2")
			delete(s.Nodes, "node-3")
		}, policy.CodeInsufficientNodes, "nodes", "1 nodes can take the workload, 2 are needed"},
		"fewer nodes than replicas": {func(r *policy.EnableRequest, _ *policy.Subject) { r.Settings = replicated(4) }, policy.CodeInsufficientNodes, "nodes", "3 nodes can take the workload, 4 are needed"},
		"fewer selected": {func(r *policy.EnableRequest, _ *policy.Subject) {
			r.Settings = selected(replicated(3), "node-1", "node-2")
		}, policy.CodeInsufficientNodes, "nodes", "2 nodes"},
		"origin not selected": {func(r *policy.EnableRequest, _ *policy.Subject) {
			r.Settings = selected(r.Settings, "node-2", "node-3")
		}, policy.CodeOriginNotSelected, "nodes", "node-1"},
		"origin not eligible": {func(_ *policy.EnableRequest, s *policy.Subject) {
			edit(s, "node-1", func(n *policy.Node) { n.Drained = true })
		}, policy.CodeOriginNotEligible, "node", "drained"},
		"unknown node": {func(r *policy.EnableRequest, _ *policy.Subject) {
			r.Settings = selected(r.Settings, "node-1", "node-2", "node-9")
		}, policy.CodeNodeUnknown, "nodes", "node-9"},
		"unknown node in the order": {func(r *policy.EnableRequest, _ *policy.Subject) {
			r.Settings.PriorityMode, r.Settings.NodePriority = true, []string{"node-1", "node-8"}
		}, policy.CodeNodeUnknown, "nodePriority", "node-8"},
		"unknown origin": {func(r *policy.EnableRequest, s *policy.Subject) { r.Node, s.Captured.Node = "node-7", "node-7" }, policy.CodeNodeUnknown, "node", "node-7"},
	} {
		t.Run(name, func(t *testing.T) {
			r, s := request(), subject()
			require.Empty(t, policy.Preflight(r, s).Blockers)
			c.change(&r, &s)
			before := encode(s)
			e := policy.Preflight(r, s)
			require.Equal(t, before, encode(s), "a preflight changes nothing")
			require.False(t, e.OK())
			require.Contains(t, codes(e.Blockers), c.code)
			b := e.Blockers[slices.Index(codes(e.Blockers), c.code)]
			require.Equal(t, c.field, b.Field)
			require.Contains(t, b.Message, c.says)
			require.Len(t, e.Nodes, len(s.Nodes), "every candidate is listed")
		})
	}
}

func edit(s *policy.Subject, node string, change func(*policy.Node)) {
	n := s.Nodes[node]
	change(&n)
	s.Nodes[node] = n
}

// ELG-3, ELG-5: every reason why a node cannot take a copy. The origin needs no
// further room.
func TestPreflight_Reasons(t *testing.T) {
	port := func(address string, number uint16, transport string, running bool) func(*policy.Node) {
		return func(n *policy.Node) {
			n.Facts.Containers = []placement.TakenName{{Name: "other", Running: running, Published: []placement.PublishedPort{{Address: address, Port: number, Transport: transport}}}}
		}
	}
	for name, c := range map[string]struct {
		change func(*policy.Node)
		code   policy.Code
		says   string
	}{
		"good":                     {func(*policy.Node) {}, "", ""},
		"offline":                  {func(n *policy.Node) { n.State = policy.NodeOffline }, policy.CodeNodeOffline, "offline"},
		"not reporting":            {func(n *policy.Node) { n.State = policy.NodeNotReporting }, policy.CodeNodeOffline, "not reporting"},
		"unseen":                   {func(n *policy.Node) { n.State = "" }, policy.CodeNodeOffline, "unseen"},
		"unknown":                  {func(n *policy.Node) { n.Known = false }, policy.CodeNodeError, "not told"},
		"error":                    {func(n *policy.Node) { n.Facts.Error = "updating" }, policy.CodeNodeError, "updating"},
		"no docker":                {func(n *policy.Node) { n.Facts.Docker = "" }, policy.CodeNodeError, "Docker"},
		"drained":                  {func(n *policy.Node) { n.Drained = true }, policy.CodeNodeDrained, "undrain"},
		"not allowed":              {func(n *policy.Node) { n.Refused = "its token allows shop" }, policy.CodeNodeGrant, "shop"},
		"other architecture":       {func(n *policy.Node) { n.Facts.Arch = "aarch64" }, policy.CodeNodeArch, "it is arm64, the image is for amd64"},
		"same, other name":         {func(n *policy.Node) { n.Facts.Arch = "x86_64" }, "", ""},
		"unknown architecture":     {func(n *policy.Node) { n.Facts.Arch = "vax" }, policy.CodeNodeArchUnknown, `"vax"`},
		"no architecture":          {func(n *policy.Node) { n.Facts.Arch = "" }, policy.CodeNodeArchUnknown, `""`},
		"no memory":                {func(n *policy.Node) { n.Facts.ReservedMemory = n.Facts.Memory - 255<<20 }, policy.CodeNodeCapacity, "255 MiB of memory are free, 256 MiB are needed"},
		"just enough memory":       {func(n *policy.Node) { n.Facts.ReservedMemory = n.Facts.Memory - 256<<20 }, "", ""},
		"memory is planned":        {func(n *policy.Node) { n.PlannedMemory = n.Facts.Memory }, policy.CodeNodeCapacity, "0 MiB"},
		"no CPU":                   {func(n *policy.Node) { n.Facts.ReservedCPU = 3501 }, policy.CodeNodeCapacity, "0.499 CPUs are free, 0.5 are needed"},
		"CPU is planned":           {func(n *policy.Node) { n.PlannedCPU = 4000 }, policy.CodeNodeCapacity, "0 CPUs"},
		"port of all addresses":    {port("", 8080, "tcp", true), policy.CodeNodePort, "port 8080/tcp is published by container other"},
		"port of 0.0.0.0":          {port("0.0.0.0", 8080, "tcp", true), policy.CodeNodePort, "other"},
		"port of [::]":             {port("::", 8080, "tcp", true), policy.CodeNodePort, "other"},
		"port of the same address": {port("10.0.0.1", 8080, "tcp", true), policy.CodeNodePort, "other"},
		"port of another address":  {port("10.0.0.2", 8080, "tcp", true), "", ""},
		"udp":                      {port("", 8080, "udp", true), "", ""},
		"another port":             {port("", 8081, "tcp", true), "", ""},
		"port of a stopped owner":  {port("", 8080, "tcp", false), "", ""},
		"own port": {func(n *policy.Node) {
			port("", 8080, "tcp", true)(n)
			n.Facts.Containers[0].Workload = "web"
		}, "", ""},
		"name": {func(n *policy.Node) { n.Facts.Containers = []placement.TakenName{{Name: "opfield-web"}} }, policy.CodeNodeName, "container opfield-web exists there"},
		"name of a copy": {func(n *policy.Node) {
			n.Facts.Containers = []placement.TakenName{{Name: "opfield-web", Workload: "web"}}
		}, "", ""},
		"original's name":  {func(n *policy.Node) { n.Facts.Containers = []placement.TakenName{{Name: "web", Running: true}} }, "", ""},
		"no relay":         {func(n *policy.Node) { n.Relay = "no relay is reached" }, policy.CodeNodeRelay, "no relay"},
		"no registry":      {func(n *policy.Node) { n.Facts.Registry = "the registry does not answer" }, policy.CodeNodeRegistry, "does not answer"},
		"several, by rank": {func(n *policy.Node) { n.State, n.Drained = policy.NodeOffline, true }, policy.CodeNodeOffline, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := subject()
			edit(&s, "node-2", c.change)
			got := policy.Preflight(request(), s).Nodes[1]
			require.Equal(t, c.code, got.Reason, got.Message)
			require.Equal(t, c.code == "", got.Eligible)
			require.Contains(t, got.Message, c.says)
		})
	}
	s := subject()
	edit(&s, "node-1", func(n *policy.Node) { // full, and the container itself has its name and port
		n.Facts.ReservedMemory, n.Facts.ReservedCPU = n.Facts.Memory, n.Facts.CPU
		n.Facts.Containers = []placement.TakenName{{Name: "web", Running: true, Published: s.Captured.Published}}
	})
	e := policy.Preflight(request(), s)
	require.True(t, e.OK(), e.Blockers)
	require.True(t, e.Nodes[0].Origin)
	r := request()
	r.Settings.Selection, r.Settings.Nodes = policy.SelectedNodes, []string{"node-1", "node-3"}
	n := policy.Preflight(r, subject()).Nodes[1]
	require.Equal(t, policy.CodeNodeNotSelected, n.Reason)
	require.False(t, n.Selected)
}

// ELG-5, PRI-6: what works, and not as well as it could.
func TestPreflight_Warnings(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*policy.Settings)
		want   []policy.Code
	}{
		"room for the surge":    {func(*policy.Settings) {}, []policy.Code{}},
		"no room for the surge": {func(s *policy.Settings) { *s = policy.DefaultSettings(policy.Replicated); s.Replicas = 3 }, []policy.Code{policy.CodeRolloutCapacity}},
		"no room, unavailable": {func(s *policy.Settings) {
			*s = policy.DefaultSettings(policy.Replicated)
			s.Replicas, s.MaxUnavailable = 3, 1
		}, []policy.Code{}},
		"no surge":              {func(s *policy.Settings) { s.MaxSurge = 0 }, []policy.Code{policy.CodeRolloutCapacity}},
		"no surge, unavailable": {func(s *policy.Settings) { s.MaxSurge, s.MaxUnavailable = 0, 1 }, []policy.Code{}},
		"failback without surge": {func(s *policy.Settings) {
			s.MaxSurge, s.MaxUnavailable, s.PriorityMode, s.NodePriority = 0, 1, true, []string{"node-1"}
		}, []policy.Code{policy.CodeFailbackSurge}},
		"failback, unavailable 1": {func(s *policy.Settings) {
			*s = policy.DefaultSettings(policy.Replicated)
			s.MaxSurge, s.MaxUnavailable, s.PriorityMode, s.NodePriority = 0, 1, true, []string{"node-1"}
		}, []policy.Code{}},
	} {
		t.Run(name, func(t *testing.T) {
			r := request()
			c.change(&r.Settings)
			e := policy.Preflight(r, subject())
			require.True(t, e.OK(), e.Blockers)
			require.Equal(t, c.want, codes(e.Warnings))
		})
	}
}

// The labels of the container fill in what was not said.
func TestPreflight_Labels(t *testing.T) {
	r, s := request(), subject()
	r.Workload, r.Ports = "", nil
	s.Captured.Workload, s.Captured.Ports = "web", []placement.Port{{Port: 81, Protocol: placement.ProtocolGRPC}}
	e := policy.Preflight(r, s)
	require.True(t, e.OK(), e.Blockers)
	require.Equal(t, "web", e.Workload)
	require.Equal(t, s.Captured.Ports, e.Ports)
}

// ELG-3: architectures by every name that Docker, kernels and images use.
func TestArchOf(t *testing.T) {
	for want, names := range map[string][]string{
		"amd64":   {"amd64", "x86_64", "X86-64", "amd64/v3", " x86_64 "},
		"arm64":   {"arm64", "aarch64", "arm64/v8"},
		"arm":     {"arm", "armhf", "armv7", "armv7l", "armv6l", "armel", "arm/v7"},
		"386":     {"386", "i386", "i486", "i586", "i686", "x86"},
		"ppc64le": {"ppc64le", "powerpc64le"},
		"s390x":   {"s390x"}, "riscv64": {"riscv64"}, "loong64": {"loong64", "loongarch64"}, "mips64le": {"mips64le"},
		"": {"", "vax", "amd", "unknown", "/v8"},
	} {
		for _, name := range names {
			require.Equal(t, want, policy.ArchOf(name), name)
		}
	}
}
