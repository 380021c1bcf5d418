package policy

import "fmt"

// Check reports why a stored document cannot be decided about, or nil.
func (d *Document) Check() error {
	if wrong := d.Settings.Validate(); len(wrong) > 0 {
		return fmt.Errorf("settings: %s: %s", wrong[0].Field, wrong[0].Message)
	}
	if d.version(d.Current) == nil {
		return fmt.Errorf("versions: that of generation %d, which shall run, is missing", d.Current)
	}
	nodes := map[string]bool{}
	for i, p := range d.Placements {
		if nodes[p.Node] {
			return fmt.Errorf("placements[%d]: node %s has two", i, p.Node)
		}
		nodes[p.Node] = true
		if err := d.desired(&p).Check(); err != nil {
			return fmt.Errorf("placements[%d]: %w", i, err)
		}
	}
	for i, op := range d.Operations {
		if op.Type == Rollout && (d.version(op.Target) == nil || op.From != 0 && d.version(op.From) == nil) {
			return fmt.Errorf("operations[%d]: the versions of rollout %s are missing", i, op.ID)
		}
	}
	return nil
}
