package simulate

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// Each invariant is shown to fail: a decision, a record or what routing is told
// is changed, and the run must notice.
func TestInvariants_CanFail(t *testing.T) {
	config := func() Config {
		return Config{Seed: 4, Nodes: 5, Policies: 2, For: 48 * time.Hour, FaultEvery: 20 * time.Minute, UserEvery: 40 * time.Minute}
	}
	ended := func(before *policy.Document, plan *policy.Plan, t policy.Type, s policy.Status) bool {
		for _, op := range newlyEnded(before, &plan.Document) {
			if op.Type == t && op.Status == s {
				return true
			}
		}
		return false
	}
	// always makes a change in each decision that has placements.
	always := func(change func(*policy.Document)) func(*Config) {
		return func(c *Config) {
			c.spoil = func(_ *policy.Document, plan *policy.Plan) {
				if len(plan.Document.Placements) > 0 {
					change(&plan.Document)
					plan.Changed = true
				}
			}
		}
	}
	spoilt := map[invariant]func(*Config){
		onePerNode: always(func(d *policy.Document) { d.Placements = append(d.Placements, d.Placements[0]) }),
		serving: func(c *Config) {
			c.spoil = func(before *policy.Document, plan *policy.Plan) {
				if len(before.Operations) == 0 && len(plan.Document.Operations) == 0 && !plan.Document.Stopped {
					for i := range plan.Document.Placements {
						if p := &plan.Document.Placements[i]; p.Want == placement.WantServing {
							p.Want, plan.Changed = placement.WantPrepared, true
						}
					}
				}
			}
		},
		surge: func(c *Config) {
			c.spoil = func(_ *policy.Document, plan *policy.Plan) {
				for i := range plan.Document.Placements {
					if p := &plan.Document.Placements[i]; p.Want == placement.WantPrepared && !plan.Document.Stopped {
						p.Want, plan.Changed = placement.WantServing, true
					}
				}
			}
		},
		originalKept: func(c *Config) {
			c.spoilRecord = func(d *placement.Desired) { d.Original = false }
		},
		onlyGrows: func(c *Config) {
			c.spoil = func(before *policy.Document, plan *policy.Plan) {
				if ps := plan.Document.Placements; len(ps) > 0 && len(before.Placements) > 0 && before.Placements[0].Generation > 1 && before.Placements[0].Node == ps[0].Node {
					ps[0].Generation, plan.Changed = 1, true
				}
			}
		},
		createdOnce: func(c *Config) {
			flip := false
			c.spoilRecord = func(d *placement.Desired) {
				if flip = !flip; flip && d.Want == placement.WantServing && d.Generation > 1 {
					d.Generation--
				}
			}
		},
		stopped: func(c *Config) {
			c.spoil = func(_ *policy.Document, plan *policy.Plan) {
				if plan.Document.Stopped && len(plan.Document.Operations) == 0 {
					plan.Document.Placements[0].Want, plan.Changed = placement.WantServing, true
				}
			}
		},
		limited: func(c *Config) {
			c.Nodes, c.Policies = 5, 8
			c.spoil = func(_ *policy.Document, plan *policy.Plan) {
				for i := range plan.Document.Operations {
					if op := &plan.Document.Operations[i]; op.Status == policy.Pending {
						op.Status, plan.Changed = policy.Running, true
					}
				}
			}
		},
		ends: func(c *Config) {
			c.spoil = func(before *policy.Document, plan *policy.Plan) {
				if n := len(before.Operations); n > 0 && len(plan.Document.Operations) < n { // nothing ever ends
					plan.Document, plan.Changed = *before, false
				}
			}
		},
		reason: func(c *Config) {
			c.spoil = func(_ *policy.Document, plan *policy.Plan) {
				for i := range plan.Document.Operations {
					plan.Document.Operations[i].Note, plan.Document.Operations[i].Message = "", ""
				}
			}
		},
		recovers: func(c *Config) {
			c.FaultEvery, c.UserEvery = 1000*time.Hour, 1000*time.Hour
			c.spoil = func(before *policy.Document, plan *policy.Plan) { // more are wanted, and nothing begins by itself
				d := &plan.Document
				if n := len(d.Operations); n > 0 && d.Operations[n-1].Status == policy.Pending {
					*plan = policy.Plan{Document: *before}
				} else if n == 0 && d.Settings.Mode == policy.Replicated && d.Settings.Replicas < 5 {
					d.Settings.Replicas, d.Settings.Selection, d.Settings.Nodes = 5, policy.AllNodes, nil
				}
			}
		},
		rolledBack: func(c *Config) {
			c.spoil = func(before *policy.Document, plan *policy.Plan) {
				if ended(before, plan, policy.Rollout, policy.Failed) {
					plan.Document.Current = plan.Document.History[0].Target
				}
			}
		},
		keepsError: func(c *Config) {
			c.spoil = func(_ *policy.Document, plan *policy.Plan) { plan.Document.Problem = nil }
		},
		members: func(c *Config) {
			c.spoilMembers = func(m *placement.Members) {
				for i := range m.Placements {
					m.Placements[i].Closed = false
				}
			}
		},
		decided: func(c *Config) {
			c.spoil = func(_ *policy.Document, plan *policy.Plan) { plan.Next = plan.Document.CreatedAt }
		},
		atRest: func(c *Config) {
			c.Policies = 1
			c.spoil = func(_ *policy.Document, plan *policy.Plan) {
				if len(plan.Document.Operations) == 0 {
					plan.Document.Counter, plan.Changed = plan.Document.Counter+1, true
					plan.Next = plan.Document.CreatedAt.Add(50*time.Hour + 30*time.Minute) // when all has been quiet for long
				}
			}
		},
	}
	for i := range lastInvariant {
		t.Run(i.String(), func(t *testing.T) {
			spoil := spoilt[i]
			require.NotNil(t, spoil, "nothing shows that this can fail")
			for seed := range uint64(40) { // some need luck
				c := config()
				c.Seed = seed
				spoil(&c)
				r := simulate(c)
				if r.Broken == nil {
					continue
				}
				var b *broken
				require.True(t, errors.As(r.Broken, &b))
				if b.invariant == i {
					return
				}
				if seed == 39 {
					require.Equal(t, i, b.invariant, r.Broken)
				}
			}
			t.Fatal("it did not fail")
		})
	}
	require.Len(t, Invariants(), int(lastInvariant))
}
