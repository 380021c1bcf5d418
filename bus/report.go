package bus

import (
	"context"
	"encoding/json"
	"time"

	"github.com/opfield/availability/identity"
	"github.com/opfield/availability/placement"
)

// ReportEvery is the longest time between two reports of a node.
const ReportEvery = 30 * time.Second

// PublishReport sends what report returns within 100 ms of a change, every
// ReportEvery, after a reconnect and, while AnswerInspect runs, when AskReport
// asks for it, until ctx ends. Node is filled in;
// nothing is sent while it returns false. It is for nodes.
func (c *Conn) PublishReport(ctx context.Context, report func() (placement.NodeReport, bool)) error {
	return c.publishState(ctx, subjectReport, ReportEvery, statusCheckEvery, c.asked, func() encoder {
		r, known := report()
		if !known {
			return nil
		}
		r.Node = c.identity.Name().ID
		return func(time.Time) ([]byte, error) { return json.Marshal(r) }
	})
}

// AskReport asks a node for its report now, such as by a controller that has
// just begun to listen. Nothing is waited for: the report comes as every other
// does. It is for the controller.
func (c *Conn) AskReport(node string) error {
	name := identity.Name{Role: identity.RoleNode, ID: node}
	if err := name.Check(); err != nil {
		return err
	}
	return c.nc.PublishRequest(member(subjectInspect, name), member(subjectInspected, name)+".report", nil)
}

// FollowReports calls fn with every report until ctx ends. It is for the
// controller.
func (c *Conn) FollowReports(ctx context.Context, fn func(placement.NodeReport)) error {
	return followState(ctx, c, subjectReport, func(r placement.NodeReport) identity.Name {
		return identity.Name{Role: identity.RoleNode, ID: r.Node}
	}, fn)
}
