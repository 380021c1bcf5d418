package discovery_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/placement"
)

func TestFold_Managed(t *testing.T) { // MOD-4, RDY-1, STP-1
	managed := func(id string, role placement.Role) discovery.Managed {
		return discovery.Managed{
			Container: id, Looked: true, Kind: placement.KindContainer, Generation: 3, Epoch: 2, Role: role, Kept: true,
			Ports: []placement.Port{{Port: 80, Protocol: placement.ProtocolTCP}},
		}
	}
	ours := web(named("ours", "10.0.0.1"), func(c *discovery.Container) { c.Labels = nil })
	foreign := web(named("foreign", "10.0.0.9"))
	fold := func(m discovery.Managed, all ...discovery.Container) []discovery.Placement {
		found, warnings := discovery.Fold("node-1", all, map[string]discovery.Managed{"web": m})
		require.Empty(t, warnings)
		return found
	}

	found := fold(managed("ours", placement.RoleServing), ours, foreign)
	require.Len(t, found, 1)
	e := found[0].Event
	require.True(t, e.Serves())
	require.EqualValues(t, 3, e.Generation)
	require.EqualValues(t, 2, e.Epoch)
	require.Equal(t, placement.ProtocolTCP, e.Ports[0].Protocol, "the desired ports, not the label's")
	require.Len(t, found[0].Targets[80], 1)
	require.Equal(t, "10.0.0.1:80", found[0].Targets[80][0].String(), "a container that is not ours does not count")

	for role, container := range map[placement.Role]discovery.Container{
		placement.RoleDraining: ours, placement.RoleStopped: ours, placement.RoleStandby: ours,
	} {
		e := fold(managed("ours", role), container)[0].Event
		require.Equal(t, role, e.Role)
		require.NoError(t, e.Check())
	}
	// Somebody stops it by hand: it drains.
	ending := ours
	ending.Stopping = true
	require.Equal(t, placement.RoleDraining, fold(managed("ours", placement.RoleServing), ending)[0].Event.Role)

	m := managed("", placement.RoleServing)
	m.Note = "container web was removed by hand and is repaired"
	e = fold(m, foreign)[0].Event
	require.False(t, e.Ready)
	require.Equal(t, placement.StateStopped, e.State)
	require.Contains(t, e.Reason, "removed by hand")
	require.NoError(t, e.Check())

	m = managed("", placement.RoleStopped)
	m.Kept = false
	require.Empty(t, fold(m, foreign), "absent, and nothing is left")
	m.Looked, m.Kept = false, true
	require.Empty(t, fold(m, foreign), "not known yet")

	// All that was remembered is lost: the labels still tell the generation.
	labelled := web(label("opfield.placement", "web.node-1"), label("opfield.generation", "7"))
	lost, _ := discovery.Fold("node-1", []discovery.Container{labelled}, nil)
	require.EqualValues(t, 7, lost[0].Event.Generation)

	// Given back: its state says what it is, its generation goes on.
	m = managed("ours", "")
	e = fold(m, ours)[0].Event
	require.True(t, e.Serves())
	require.EqualValues(t, 3, e.Generation)
}
