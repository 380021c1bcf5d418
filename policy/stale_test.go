package policy_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// PRI-2, LOS-3: a node comes back with its old copy still running, and is chosen
// at once. What it said before it was asked is no answer: the backup serves on.
func TestDecide_OldWordIsNoAnswer(t *testing.T) {
	s := &script{t: t}
	lines(t, s, "nodes 3\nenable node-1 mode=failover priority=node-1,node-2,node-3 delay=0\nuntil idle 1m")
	old := s.w.observed["node-1"]
	require.True(t, old.Ready)
	lines(t, s, "node-1 offline\nwait 40s\nexpect serving node-2\nnode-1 online")
	for range 10 { // the node has not said anything since
		s.w.now = s.w.now.Add(tick)
		s.w.observed["node-1"] = old
		s.w.decide()
	}
	require.Equal(t, "failback:running", s.look([]string{"operations"}))
	require.Equal(t, "node-1,node-2", s.look([]string{"members"}), "both are open until node-1 answers")
	lines(t, s, "until idle 1m\nexpect serving node-1")
}
