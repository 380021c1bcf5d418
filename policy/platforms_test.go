package policy_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// IMG-2: the platforms that an image has where it came from count before it is
// mirrored; if they were not to be had, those that it has count, and the reason
// is told.
func TestPlatforms(t *testing.T) {
	s := subject()
	s.Captured.Platforms = []string{"linux/amd64", "linux/arm64"}
	edit(&s, "node-2", func(n *policy.Node) { n.Facts.Arch = "aarch64" })
	e := policy.Preflight(request(), s)
	require.True(t, e.Nodes[1].Eligible, e.Nodes[1].Message)

	d := policy.NewDocument(time.Unix(0, 0), e, s.Captured, 0)
	w := policy.World{Nodes: s.Nodes}
	require.Empty(t, d.Versions[0].Image.Digest)
	decided := policy.Decide(time.Unix(1, 0), d, policy.World{Nodes: s.Nodes, Slot: true})
	mirror := decided.Document.Desired()["node-1"].Mirror
	require.NotNil(t, mirror)
	require.Equal(t, []string{"linux/amd64", "linux/arm64"}, mirror.Platforms, "those of the nodes, and no more")
	// A controller that has just begun has not heard from all of them.
	edit(&s, "node-2", func(n *policy.Node) { n.Facts = placement.NodeFacts{} })
	decided = policy.Decide(time.Unix(1, 0), d, policy.World{Nodes: s.Nodes, Slot: true})
	require.Empty(t, decided.Document.Desired()["node-1"].Mirror.Platforms, "every platform")
	edit(&s, "node-2", func(n *policy.Node) { n.Facts.Arch = "aarch64" })
	notices := func() (found []policy.Notice) {
		for _, n := range policy.Show(d, w).Warnings {
			if n.Code == policy.CodeNodeArch {
				found = append(found, n)
			}
		}
		return found
	}
	require.Empty(t, notices())
	d.Versions[0].Image = placement.Image{Digest: "sha256:1", Platforms: []string{"linux/amd64"}, Narrowed: "the registry does not answer"}
	require.Equal(t, []policy.Notice{{
		Code: policy.CodeNodeArch, Field: "nodes", Message: "node-2 cannot take it, the image is for amd64 only: the registry does not answer",
	}}, notices())
	d.Settings.Selection, d.Settings.Nodes = policy.SelectedNodes, []string{"node-1", "node-3"}
	require.Empty(t, notices(), "it shall not take it")
}
