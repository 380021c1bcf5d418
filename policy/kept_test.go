package policy_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

func captured(node string) (policy.Eligibility, placement.Captured) {
	return policy.Eligibility{Workload: "web", Settings: policy.DefaultSettings(policy.Replicated)},
		placement.Captured{Node: node, Kind: placement.KindContainer, ID: "c1", Name: "web", Spec: []byte(`{}`), RestartPolicy: "always"}
}

// The result of a disable names what stays, from its beginning on: the policy
// is gone with its end.
func TestDisable_Result(t *testing.T) { // STP-2, DIS-1
	now := time.Unix(1000, 0)
	el, c := captured("node-1")
	doc := policy.NewDocument(now, el, c, 0)
	doc.Operations, doc.Routed = nil, true
	doc.Versions[0].Image.Digest = "sha256:1"
	doc.Placements = append(doc.Placements, policy.Placement{Node: "node-2", Want: placement.WantServing, Generation: 1, Revision: 3, Asked: 3, Since: now})
	w := policy.World{Nodes: map[string]policy.Node{}, Observed: map[string]placement.Observed{}, Timing: policy.DefaultTiming(), Slot: true}
	for i, p := range doc.Placements {
		w.Nodes[p.Node] = policy.Node{ID: p.Node, State: policy.NodeOnline, Known: true}
		w.Observed[p.Node] = placement.Observed{Workload: "web", Node: p.Node, Generation: 1, Revision: doc.Placements[i].Revision,
			Role: placement.RoleServing, State: placement.StateRunning, Ready: true, Done: true, ImageReady: true}
	}
	_, refusal := doc.Disable(now, policy.DisableRequest{Survivor: "node-2", Confirm: "web"}, w)
	require.Nil(t, refusal)
	plan := policy.Decide(now, doc, w)
	require.Contains(t, plan.Document.Operations[0].Result, "the workload runs on node-2")
	require.Contains(t, plan.Document.Operations[0].Result, "its original is stopped on node-1")

	// What is released gets the restart policy of the original, but for an
	// original that another copy outlived.
	out := plan.Document
	for i := range out.Placements {
		out.Placements[i].Want = placement.WantReleased
	}
	want := out.Desired()
	require.Equal(t, "always", want["node-2"].RestartPolicy)
	require.Equal(t, "web", want["node-2"].Container)
	require.False(t, want["node-2"].Retired)
	require.True(t, want["node-1"].Retired)
}

// What is given up gets no advice about room for a rollout.
func TestMayRollOut_Disabling(t *testing.T) { // DIS-3
	el, c := captured("node-1")
	doc := policy.NewDocument(time.Unix(1000, 0), el, c, 0)
	doc.Disabling = true
	require.Equal(t, policy.CodeDisableInProgress, doc.MayRollOut(policy.World{}, policy.Change{Image: "web:2"}).Code)
}

// Room is looked for with the limits that the change asks for: one that no
// node has is refused, and one that takes such a limit back is not. What is
// wrong in a change comes before any advice about room.
func TestMayRollOut_Limits(t *testing.T) { // ELG-5
	limit := func(n int64) *int64 { return &n }
	s := running(t, "mode=replicated replicas=2")
	doc, w := s.w.doc, s.w.world()
	require.Nil(t, doc.MayRollOut(w, policy.Change{Image: "web:2"}))
	refusal := doc.MayRollOut(w, policy.Change{CPU: limit(99_999_000)})
	require.NotNil(t, refusal)
	require.Equal(t, policy.CodeRolloutCapacity, refusal.Code)
	require.Contains(t, refusal.Message, "99999 are needed")

	doc.Versions[0].CPU = 99_999_000
	require.NotNil(t, doc.MayRollOut(w, policy.Change{Image: "web:2"}))
	require.Nil(t, doc.MayRollOut(w, policy.Change{CPU: limit(0)}))
	require.Equal(t, policy.CodeChangeEmpty, doc.MayRollOut(w, policy.Change{}).Code)
}
