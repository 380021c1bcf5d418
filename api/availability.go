package api

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/policy"
)

// maxWait bounds a long poll; it stays below callWithin.
const maxWait = 15 * time.Second

// Availability is the policy engine. Every error that is the user's is a
// *policy.Refusal. Its methods may be called by several goroutines at the same
// time.
type Availability interface {
	Check(context.Context, policy.EnableRequest) (policy.Eligibility, error)
	Enable(context.Context, policy.EnableRequest) (policy.Operation, error)
	// Known says why List, Get and Watch do not know the policies; nil: they do.
	Known() error
	List() []policy.View
	Get(workload string) (policy.View, bool)
	// Watch returns the present view and a channel that is closed at the next
	// change.
	Watch(workload string) (view policy.View, changed <-chan struct{}, ok bool)
	// Operations returns the running and queued ones first, then the history.
	Operations(workload string) ([]policy.Operation, error)
	Update(ctx context.Context, workload string, settings policy.Settings) (policy.Operation, error)
	Rollout(ctx context.Context, workload string, change policy.Change) (policy.Operation, error)
	Disable(ctx context.Context, workload string, req policy.DisableRequest) (policy.Operation, error)
	// Do queues a start, stop or restart.
	Do(ctx context.Context, workload string, what policy.Type) (policy.Operation, error)
	Retry(ctx context.Context, workload, operation string) (policy.Operation, error)

	Nodes() []policy.Node
	DrainNode(ctx context.Context, node string) error
	UndrainNode(ctx context.Context, node string) error
	ConfirmLost(ctx context.Context, node string) error
	RemoveNode(ctx context.Context, node string) error
	RenameNode(ctx context.Context, node, name string) error
}

// PolicyList is the answer of GET /v1/availability.
type PolicyList struct {
	Policies []policy.View `json:"policies"` // sorted by workload
}

// OperationList is the answer of GET /v1/availability/{workload}/operations.
type OperationList struct {
	Operations []policy.Operation `json:"operations"` // running and queued first, then the history, newest first
}

// named is a request about one workload. It is not embedded: the framework
// does not look into unexported fields.
type named struct {
	Workload string `path:"workload" doc:"Name of the workload."`
}

// operationOf is a request about one operation of a workload.
type operationOf struct {
	Workload string `path:"workload" doc:"Name of the workload."`
	ID       string `path:"id" doc:"Id of the operation."`
}

// accepted is the answer to every change: it is stored, not done. (MOD-5)
type accepted struct {
	Location string `header:"Location" doc:"Where to look how far the operation is."`
	Body     policy.Operation
}

// found is an answer with nothing but a document.
type found[T any] struct{ Body T }

type getPolicy struct {
	Workload string `path:"workload" doc:"Name of the workload."`
	Wait     int    `query:"wait" doc:"Seconds to wait for a change of what If-None-Match names; at most 15 count." minimum:"0"`
	Have     string `header:"If-None-Match" doc:"ETag of the version that is known; 304 if it is still so."`
}

type gotPolicy struct {
	Status int
	ETag   string `header:"ETag" doc:"Version of the answer."`
	Body   policy.View
}

// availabilityRoutes registers everything about policies.
func (s *Server) availabilityRoutes(a huma.API) {
	register(s, a, call{http.MethodPost, "/v1/availability/check", "check-availability", "Say whether a workload can be made available; nothing is changed", policy.CodeSettings},
		func(ctx context.Context, in *struct{ Body EnableOrder }) (*found[policy.Eligibility], error) {
			req, err := in.Body.request()
			if err != nil {
				return nil, err
			}
			out, err := s.Availability.Check(ctx, req)
			return &found[policy.Eligibility]{out}, err
		})
	order(s, a, call{http.MethodPost, "/v1/availability", "enable-availability", "Make a workload available", policy.CodeSettings},
		func(ctx context.Context, in *struct{ Body EnableOrder }) (string, policy.Operation, error) {
			req, err := in.Body.request()
			if err != nil {
				return req.Workload, policy.Operation{}, err
			}
			op, err := s.Availability.Enable(ctx, req)
			return req.Workload, op, err
		})
	register(s, a, call{http.MethodGet, "/v1/availability", "list-availability", "Every policy", ""},
		func(context.Context, *struct{}) (*found[PolicyList], error) {
			if err := s.Availability.Known(); err != nil {
				return nil, err
			}
			return &found[PolicyList]{PolicyList{append([]policy.View{}, s.Availability.List()...)}}, nil
		})
	register(s, a, call{http.MethodGet, "/v1/availability/{workload}", "get-availability", "One policy; with wait, at its next change", ""}, s.getPolicy)
	order(s, a, call{http.MethodPut, "/v1/availability/{workload}/settings", "replace-settings", "Replace the settings; what is absent gets its default", policy.CodeSettings},
		func(ctx context.Context, in *struct {
			Workload string `path:"workload" doc:"Name of the workload."`
			Body     SettingsChange
		}) (string, policy.Operation, error) {
			s.write.Lock()
			defer s.write.Unlock()
			return s.update(ctx, in.Workload, in.Body.settings())
		})
	order(s, a, call{http.MethodPatch, "/v1/availability/{workload}/settings", "change-settings", "Change the settings that are given; the others stay", policy.CodeSettings},
		func(ctx context.Context, in *struct {
			Workload string `path:"workload" doc:"Name of the workload."`
			Body     SettingsChange
		}) (string, policy.Operation, error) {
			s.write.Lock() // of two changes at once none gets lost
			defer s.write.Unlock()
			if err := s.Availability.Known(); err != nil {
				return in.Workload, policy.Operation{}, err
			}
			view, ok := s.Availability.Get(in.Workload)
			if !ok {
				return in.Workload, policy.Operation{}, notEnabled(in.Workload)
			}
			return s.update(ctx, in.Workload, in.Body.over(view.Settings))
		})
	order(s, a, call{http.MethodPost, "/v1/availability/{workload}/rollout", "roll-out", "Bring a new version to every copy", policy.CodeChangeInvalid},
		func(ctx context.Context, in *struct {
			Workload string `path:"workload" doc:"Name of the workload."`
			Body     policy.Change
		}) (string, policy.Operation, error) {
			op, err := s.Availability.Rollout(ctx, in.Workload, in.Body)
			return in.Workload, op, err
		})
	order(s, a, call{http.MethodPost, "/v1/availability/{workload}/disable", "disable-availability", "Give the policy up and keep one placement", policy.CodeConfirmation},
		func(ctx context.Context, in *struct {
			Workload string `path:"workload" doc:"Name of the workload."`
			Body     DisableOrder
		}) (string, policy.Operation, error) {
			op, err := s.Availability.Disable(ctx, in.Workload, policy.DisableRequest(in.Body))
			return in.Workload, op, err
		})
	for what, summary := range map[policy.Type]string{
		policy.Stop:    "Stop every copy and keep it",
		policy.Start:   "Start the copies that served last",
		policy.Restart: "Restart the serving copies one after another",
	} {
		order(s, a, call{http.MethodPost, "/v1/availability/{workload}/" + string(what), string(what) + "-workload", summary, ""},
			func(ctx context.Context, in *named) (string, policy.Operation, error) {
				op, err := s.Availability.Do(ctx, in.Workload, what)
				return in.Workload, op, err
			})
	}
	register(s, a, call{http.MethodGet, "/v1/availability/{workload}/operations", "list-operations", "Operations: running and queued ones, then the history", ""},
		func(_ context.Context, in *named) (*found[OperationList], error) {
			all, err := s.Availability.Operations(in.Workload)
			return &found[OperationList]{OperationList{append([]policy.Operation{}, all...)}}, err
		})
	register(s, a, call{http.MethodGet, "/v1/availability/{workload}/operations/{id}", "get-operation", "One operation", ""}, s.getOperation)
	order(s, a, call{http.MethodPost, "/v1/availability/{workload}/operations/{id}/retry", "retry-operation", "Ask for a failed operation again, as a new one; one that waits begins now", ""},
		func(ctx context.Context, in *operationOf) (string, policy.Operation, error) {
			op, err := s.Availability.Retry(ctx, in.Workload, in.ID)
			return in.Workload, op, err
		})
}

func notEnabled(workload string) error {
	return &policy.Refusal{Code: policy.CodeUnknown, Message: "workload " + workload + " has no policy; see `opfield ha list`", NotFound: true}
}

func (s *Server) update(ctx context.Context, workload string, settings policy.Settings) (string, policy.Operation, error) {
	if err := valid(settings); err != nil {
		return workload, policy.Operation{}, err
	}
	op, err := s.Availability.Update(ctx, workload, settings)
	return workload, op, err
}

// getPolicy answers at once, or with wait at the first version that is not
// the one the client has.
func (s *Server) getPolicy(ctx context.Context, in *getPolicy) (*gotPolicy, error) {
	wait, cancel := context.WithTimeout(ctx, min(time.Duration(in.Wait)*time.Second, maxWait))
	defer cancel()
	for {
		if err := s.Availability.Known(); err != nil {
			return nil, err
		}
		view, changed, ok := s.Availability.Watch(in.Workload)
		if !ok {
			return nil, notEnabled(in.Workload)
		}
		tag, err := tagOf(view)
		if err != nil {
			return nil, err
		}
		out := &gotPolicy{Status: http.StatusOK, ETag: tag, Body: view}
		if tag != in.Have {
			return out, nil
		}
		select {
		case <-changed:
		case <-wait.Done():
			out.Status = http.StatusNotModified
			return out, ctx.Err()
		}
	}
}

// tagOf is the same for the same content.
func tagOf(v any) (string, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return `"` + hex.EncodeToString(sum[:12]) + `"`, nil
}

func (s *Server) getOperation(_ context.Context, in *operationOf) (*found[policy.Operation], error) {
	all, err := s.Availability.Operations(in.Workload)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(all, func(op policy.Operation) bool { return op.ID == in.ID })
	if i < 0 {
		return nil, &policy.Refusal{Code: policy.CodeOperationUnknown, NotFound: true, Message: "workload " + in.Workload + " has no operation of that id; see `opfield ha operations " + in.Workload + "`"}
	}
	return &found[policy.Operation]{all[i]}, nil
}

// nodeOf is a request about one node.
type nodeOf struct {
	Node string `path:"node" doc:"Id of the node."`
}

// nodeRoutes registers what can be asked for about nodes. The answers have no
// content: GET /v1/nodes shows what became of it.
func (s *Server) nodeRoutes(a huma.API) {
	for _, c := range []struct {
		call
		do func(Availability, context.Context, string) error
	}{
		{call{http.MethodPost, "/v1/nodes/{node}/drain", "drain-node", "Move every placement away from the node and choose it no more", ""}, Availability.DrainNode},
		{call{http.MethodPost, "/v1/nodes/{node}/undrain", "undrain-node", "Let the node be chosen again", ""}, Availability.UndrainNode},
		{call{http.MethodPost, "/v1/nodes/{node}/confirm-lost", "confirm-lost-node", "Say that a silent node is lost, so that its placements are replaced", ""}, Availability.ConfirmLost},
		{call{http.MethodDelete, "/v1/nodes/{node}", "remove-node", "Forget a node that no policy uses", ""}, Availability.RemoveNode},
	} {
		register(s, a, c.call, func(ctx context.Context, in *nodeOf) (*struct{}, error) {
			err := c.do(s.Availability, ctx, in.Node)
			if err == nil {
				s.accepted(ctx, bus.AuditEvent{Request: c.id, Method: c.method, Path: c.pathOf("", in.Node), Node: in.Node, Text: fmt.Sprintf("%s %s", c.id, in.Node)})
			}
			return nil, err
		})
	}
	rename := call{http.MethodPut, "/v1/nodes/{node}/name", "rename-node", "Set the name under which the node is shown; its id stays", ""}
	register(s, a, rename,
		func(ctx context.Context, in *struct {
			Node string `path:"node" doc:"Id of the node."`
			Body NodeName
		}) (*struct{}, error) {
			err := s.Availability.RenameNode(ctx, in.Node, in.Body.Name)
			if err == nil {
				s.accepted(ctx, bus.AuditEvent{Request: rename.id, Method: rename.method, Path: rename.pathOf("", in.Node), Node: in.Node, Text: fmt.Sprintf("%s %s", rename.id, in.Node)})
			}
			return nil, err
		})
}

// NodeName is the body of PUT /v1/nodes/{node}/name.
type NodeName struct {
	Name string `json:"name" doc:"For people; empty: the id."`
}
