package placement

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// ErrInvalidDesired is the cause of every error about the content of a
// Desired.
var ErrInvalidDesired = errors.New("invalid desired placement")

// Want says what a node shall make of a placement.
type Want string

// What can be wanted. A placement without a Desired is left alone: nothing is
// removed because a record is missing.
const (
	// WantPrepared: the image is on the node; no container runs. An original
	// is stopped and kept, any other container of the placement is removed
	// (LOS-6).
	WantPrepared Want = "prepared"
	// WantServing: the container runs and takes traffic once it is ready.
	WantServing Want = "serving"
	// WantDraining: the container runs on, its links take no new stream.
	WantDraining Want = "draining"
	// WantStopped: the container is kept and does not run (STP-1).
	WantStopped Want = "stopped"
	// WantAbsent: nothing of the placement is left on the node. An original is
	// stopped and kept (STP-2).
	WantAbsent Want = "absent"
	// WantReleased: the container is not ours any more: it keeps running or
	// stays stopped, gets its own restart policy back, and no label or record
	// makes it owned (MOD-6, DIS-1).
	WantReleased Want = "released"
)

// Image is an image in the internal registry.
type Image struct {
	Repository string `json:"repository"` // without host, such as "web"
	Digest     string `json:"digest"`     // of the manifest or index: "sha256:…"
	Config     string `json:"config"`     // of the configuration of the origin's platform: the same image has the same (IMG-2)
	// Platforms lists "os/arch" of every platform that the digest has.
	Platforms []string `json:"platforms,omitempty"`
	// Narrowed says why platforms are missing that the image may have in the
	// registry it came from; empty: none are.
	Narrowed string `json:"narrowed,omitempty"`
}

// Mirror asks a node to push an image into the internal registry.
type Mirror struct {
	Repository string `json:"repository"`
	// Source is an image id ("sha256:…") or a reference. A reference is pulled
	// first; if that fails and the node has it, what the node has counts.
	Source string `json:"source"`
	// Platforms lists "os/arch" of the nodes that may run it: of an index no
	// more than that is copied. Empty: everything that it has.
	Platforms []string `json:"platforms,omitempty"`
}

// Equal reports whether both ask for the same.
func (m *Mirror) Equal(other *Mirror) bool {
	if m == nil || other == nil {
		return m == other
	}
	return m.Repository == other.Repository && m.Source == other.Source && slices.Equal(m.Platforms, other.Platforms)
}

// Desired is what the controller wants of one placement. It is
// level-triggered: the node compares it with what is and repairs.
type Desired struct {
	Workload string `json:"workload"`
	Node     string `json:"node"`
	Kind     Kind   `json:"kind"`
	// Revision grows with every change of this record; an older one never
	// overrides a newer.
	Revision uint64 `json:"revision"`
	// Generation of the specification. A container of an older generation is
	// replaced by one of this when it shall serve, and removed otherwise.
	Generation uint64 `json:"generation"`
	Epoch      uint64 `json:"epoch,omitempty"` // of the lease; 0 without one
	Want       Want   `json:"want"`
	// Original: the copy under the workload's own name. Its container may be
	// recreated for a new generation, but is never deleted (STP-2).
	Original bool `json:"original,omitempty"`
	// Adopt is the full id of the container that is this placement as it runs;
	// it counts as the generation AdoptedAt and is not recreated for it.
	Adopt     string `json:"adopt,omitempty"`
	AdoptedAt uint64 `json:"adoptedAt,omitempty"`
	Container string `json:"container"` // its name on the node
	Ports     []Port `json:"ports"`
	Image     Image  `json:"image"` // empty digest: not known yet, nothing is pulled
	// Spec is understood by the part of the node that carries out the kind: a
	// ContainerSpec for KindContainer. It holds the environment: a secret.
	Spec json.RawMessage `json:"spec,omitempty"`
	// Restarts counts the restarts asked for: a container that was started
	// before the last one was asked for is restarted once.
	Restarts uint64 `json:"restarts,omitempty"`
	// DrainSeconds bounds the running streams after the links closed.
	DrainSeconds int     `json:"drainSeconds"`
	Mirror       *Mirror `json:"mirror,omitempty"`
	// Prefetch is an image that is pulled beside Image, before it is needed.
	Prefetch *Image `json:"prefetch,omitempty"`
	// RestartPolicy is Docker's restart policy ("always", "on-failure:3", …)
	// that the workload gets back when it is released.
	RestartPolicy string `json:"restartPolicy,omitempty"`
	// Retired: a released original that another copy outlived: it stays
	// stopped, with restart policy "no" (STP-2, DIS-1).
	Retired bool `json:"retired,omitempty"`
}

// ID returns the placement.
func (d Desired) ID() ID { return ID{Workload: d.Workload, Node: d.Node} }

// Check reports the first field that no Desired may have.
func (d Desired) Check() error {
	if err := d.ID().Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidDesired, err)
	}
	switch d.Want {
	case WantPrepared, WantServing, WantDraining, WantStopped, WantAbsent, WantReleased:
	default:
		return fmt.Errorf("%w: want: %q; use prepared, serving, draining, stopped, absent or released", ErrInvalidDesired, d.Want)
	}
	switch d.Kind {
	case KindContainer, KindDeployment, KindCompose:
	default:
		return fmt.Errorf("%w: kind: want container, deployment or compose", ErrInvalidDesired)
	}
	if d.Revision == 0 || d.Generation == 0 {
		return fmt.Errorf("%w: revision and generation begin with 1", ErrInvalidDesired)
	}
	if d.Container == "" {
		return fmt.Errorf("%w: container: a name is required", ErrInvalidDesired)
	}
	return nil
}

// Fault is why something wanted is not so.
type Fault struct {
	Code     string `json:"code"`    // stable, such as AVAILABILITY_DAEMON_BUSY
	Message  string `json:"message"` // for people
	Attempts int    `json:"attempts,omitempty"`
	// Final: trying again without a change cannot help. Everything else is
	// tried again by the node itself.
	Final bool `json:"final,omitempty"`
}

// Codes of faults that more than one part knows.
const (
	CodeDaemonBusy     = "AVAILABILITY_DAEMON_BUSY"      // Docker did not answer in time; tried again
	CodeRegistryAway   = "AVAILABILITY_REGISTRY_AWAY"    // the internal registry did not answer; tried again
	CodeImagePull      = "AVAILABILITY_IMAGE_PULL"       // the image cannot be pulled
	CodeImageMirror    = "AVAILABILITY_IMAGE_MIRROR"     // the image cannot be pushed into the internal registry
	CodeImagePlatform  = "AVAILABILITY_IMAGE_PLATFORM"   // the image has no variant for the node
	CodeContainerStart = "AVAILABILITY_CONTAINER_START"  // Docker refused to create or start it
	CodeNameTaken      = "AVAILABILITY_NAME_TAKEN"       // a container that is not ours has the name
	CodePortTaken      = "AVAILABILITY_PORT_TAKEN"       // a published port is in use
	CodeNotReady       = "AVAILABILITY_NOT_READY"        // it started, and did not become ready
	CodeCrashLoop      = "AVAILABILITY_RESTART_LOOP"     // it ends again and again
	CodeAdoptGone      = "AVAILABILITY_ORIGINAL_REMOVED" // the container to adopt does not exist
)

// Observed is what a node says about one placement that is desired of it, or
// that it owns without a Desired.
type Observed struct {
	Workload string `json:"workload"`
	Node     string `json:"node"`
	// Revision of the Desired this was compared with; 0: there is none.
	Revision uint64 `json:"revision"`
	// Done: everything that Revision asks for is so, readiness excepted.
	Done       bool   `json:"done"`
	Generation uint64 `json:"generation"`          // of the container; 0: there is none
	Container  string `json:"container,omitempty"` // its full id
	// ImageReady: the wanted image is on the node.
	ImageReady bool `json:"imageReady"`
	// PrefetchReady: so is Desired.Prefetch.
	PrefetchReady bool   `json:"prefetchReady,omitempty"`
	ImageConfig   string `json:"imageConfig,omitempty"` // config digest of the container's image
	Role          Role   `json:"role"`
	State         State  `json:"state"` // StateRemoved: there is no container
	Ready         bool   `json:"ready"`
	Reason        string `json:"reason,omitempty"` // why it is not ready
	Restarts      uint64 `json:"restarts"`         // of Desired.Restarts, done
	// Crashes counts how often the container ended by itself lately; Looping
	// says that it is not worth waiting for the next start.
	Crashes int  `json:"crashes,omitempty"`
	Looping bool `json:"looping,omitempty"`
	Streams int  `json:"streams"` // running on its links
	// Mirrored answers Desired.Mirror.
	Mirrored *Image `json:"mirrored,omitempty"`
	// Outside is the last change that somebody made by hand and that was
	// repaired, with a number that grows (MOD-4).
	Outside       string `json:"outside,omitempty"`
	OutsideNumber uint64 `json:"outsideNumber,omitempty"`
	Fault         *Fault `json:"fault,omitempty"`
}

// ID returns the placement.
func (o Observed) ID() ID { return ID{Workload: o.Workload, Node: o.Node} }

// Members are the placements of a workload with a policy. Only they count in
// routing, and none older than its generation and epoch (DSC-2, LOS-3).
type Members struct {
	Workload   string   `json:"workload"`
	Placements []Member `json:"placements"`
	// Moving: a planned move is at work. What nginx lists may wait for its end,
	// because joined links already lead right (RTE-8).
	Moving bool `json:"moving,omitempty"`
}

// Member is one placement that may serve.
type Member struct {
	Node       string `json:"node"`
	Generation uint64 `json:"generation"` // the oldest that counts
	Epoch      uint64 `json:"epoch,omitempty"`
	// Closed: it takes no new stream; running ones go on.
	Closed bool `json:"closed,omitempty"`
}
