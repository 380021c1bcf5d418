package policy

import "time"

// Type says what an operation is for.
type Type string

// The types of operations (OPS-1).
const (
	Enable   Type = "enable"
	Scale    Type = "scale"
	Rollout  Type = "rollout"
	Heal     Type = "heal"
	Failback Type = "failback"
	Start    Type = "start"
	Stop     Type = "stop"
	Restart  Type = "restart"
	Disable  Type = "disable"
	Cleanup  Type = "cleanup"
)

// Limited reports whether the type counts against the number of policies that
// are worked on at once (OPS-2).
func (t Type) Limited() bool {
	switch t {
	case Heal, Scale, Rollout, Enable, Cleanup:
		return true
	}
	return false
}

// lifecycle reports whether the type starts or stops the workload as it is.
func (t Type) lifecycle() bool { return t == Start || t == Stop || t == Restart || t == Disable }

// Phase says how far an operation is.
type Phase string

// The phases, in their order.
const (
	Queued                Phase = "queued"
	Locking               Phase = "locking"
	Validating            Phase = "validating"
	SelectingNodes        Phase = "selecting_nodes"
	PreparingImages       Phase = "preparing_images"
	PreparingDependencies Phase = "preparing_dependencies"
	Starting              Phase = "starting"
	CheckingHealth        Phase = "checking_health"
	ActivatingRoutes      Phase = "activating_routes"
	Draining              Phase = "draining"
	Stopping              Phase = "stopping"
	CleaningUp            Phase = "cleaning_up"
	Finalizing            Phase = "finalizing"
	Done                  Phase = "done"
)

// Phases returns all phases in their order.
func Phases() []Phase {
	return []Phase{
		Queued, Locking, Validating, SelectingNodes, PreparingImages, PreparingDependencies, Starting,
		CheckingHealth, ActivatingRoutes, Draining, Stopping, CleaningUp, Finalizing, Done,
	}
}

// Status says what an operation does at the moment.
type Status string

// The statuses.
const (
	Pending        Status = "pending"         // queued
	Running        Status = "running"         //
	Waiting        Status = "waiting"         // for its next attempt; it gave up its turn
	Completed      Status = "completed"       //
	Failed         Status = "failed"          // for good; Retry queues it again
	CleanupPending Status = "cleanup_pending" // done, but a node that is away has something left
	Cancelled      Status = "cancelled"       //
)

// Over reports whether the operation has ended.
func (s Status) Over() bool { return s == Completed || s == Failed || s == Cancelled }

// Operation is one thing that is done to a workload. Its progress is that of
// the document: what an operation has reached is seen from the placements, so
// nothing is done twice after a restart of the controller.
type Operation struct {
	ID     string `json:"id"` // "<workload>-<number>"
	Type   Type   `json:"type"`
	Phase  Phase  `json:"phase"`
	Status Status `json:"status"`
	Reason string `json:"reason,omitempty"` // why it exists, for people
	// Progress is the share of placements that are as they shall be, 0 to 100.
	Progress int `json:"progress"`
	// Note says what it waits for at the moment.
	Note     string    `json:"note,omitempty"`
	Attempts int       `json:"attempts"` // that failed
	Code     Code      `json:"code,omitempty"`
	Message  string    `json:"message,omitempty"`
	Next     time.Time `json:"next,omitzero"` // of the next attempt
	// Tried is when a node chosen by the operation failed it; it is chosen
	// last by the next attempt.
	Avoid      []string  `json:"avoid,omitempty"`
	CreatedAt  time.Time `json:"createdAt"`
	StartedAt  time.Time `json:"startedAt,omitzero"`
	FinishedAt time.Time `json:"finishedAt,omitzero"`
	// Worked is the time it ran with a controller alive, up to Seen: what
	// counts against the time limit of a rollout (ROL-2).
	Worked time.Duration `json:"worked,omitempty"`
	Seen   time.Time     `json:"seen,omitzero"`

	// Of single types.
	Target     uint64   `json:"target,omitempty"`     // rollout: the generation to reach
	From       uint64   `json:"from,omitempty"`       // rollout: the generation before
	RolledBack bool     `json:"rolledBack,omitempty"` // rollout: it is going back
	Survivor   string   `json:"survivor,omitempty"`   // disable: node of the surviving placement
	Left       []string `json:"left,omitempty"`       // restart: nodes still to be restarted; disable: stopped originals that stay
	Result     string   `json:"result,omitempty"`     // for people, once it is over
	Steps      []Step   `json:"steps,omitempty"`      // what was done, oldest first
}

// Step is one thing that an operation did, for people and for tests: no step
// occurs twice in one attempt.
type Step struct {
	At   time.Time `json:"at"`
	Name string    `json:"name"` // such as "start web on node-2, generation 3"
}
