package api

import (
	"fmt"
	"time"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/identity"
)

// Liveness is what the controller makes of a process's silence.
type Liveness string

// The states of liveness. A node that is silent on NATS only is not
// reporting, and nothing is moved for that (LOS-1).
const (
	Unseen       Liveness = "unseen" // since this controller started
	Online       Liveness = "online"
	NotReporting Liveness = "not reporting"
	Offline      Liveness = "offline"
)

// silentAfter is how long a process may be silent: two of its status messages
// (every 2 s) are missing and a second has passed.
const silentAfter = 5 * time.Second

// quietAfter is when a process that is not silent yet has missed a message:
// nodes that went silent together are noticed up to 2 s after each other.
const quietAfter = 2500 * time.Millisecond

// seen is the newest status of a process and when it arrived by our clock.
type seen struct {
	status bus.Status
	at     time.Time
}

// verdict is the liveness of one node with its reason.
type verdict struct {
	state  Liveness
	reason string
}

// judge decides about every known node. heard is since when the controller
// hears NATS without a break (zero: it does not); before is the state until now.
// It is pure.
func judge(now, heard time.Time, nodes []string, processes map[identity.Name]seen, before map[string]Liveness) map[string]verdict {
	fresh := func(n identity.Name) bool {
		s, ok := processes[n]
		return ok && now.Sub(s.at) < silentAfter
	}
	relays, silentRelays := 0, 0
	sessions := map[string]string{} // node → a relay that holds its session
	for name, s := range processes {
		if name.Role != identity.RoleRelay || s.status.Relay == nil {
			continue
		}
		if !fresh(name) {
			silentRelays++
			continue
		}
		relays++
		for _, session := range s.status.Relay.Sessions {
			if n := session.Name; n.Role == identity.RoleNode {
				sessions[n.ID] = max(sessions[n.ID], name.ID)
			}
		}
	}
	out := map[string]verdict{}
	var lost []string
	alive, quiet := 0, 0
	for _, node := range nodes {
		name := identity.Name{Role: identity.RoleNode, ID: node}
		relay, held := sessions[node]
		_, known := processes[name]
		switch {
		case fresh(name):
			out[node] = verdict{Online, ""}
			if now.Sub(processes[name].at) < quietAfter {
				alive++
			} else {
				quiet++
			}
		case heard.IsZero() || now.Sub(heard) < silentAfter:
			out[node] = verdict{NotReporting, "the controller itself is not, or only just, connected to NATS"}
			if !known {
				out[node] = verdict{Unseen, ""}
			}
		case held:
			out[node] = verdict{NotReporting, fmt.Sprintf("silent on NATS, but relay %s holds its session", relay)}
		case relays == 0 && silentRelays > 0:
			out[node] = verdict{NotReporting, "silent on NATS, and no relay reports whether it holds its session"}
		default:
			out[node] = verdict{Offline, "silent on NATS, and no relay holds its session"}
			if before[node] != Offline {
				lost = append(lost, node)
			}
		}
	}
	// Most nodes at once: it is more likely us than them (LOS-4).
	if gone := len(lost) + quiet; gone >= 2 && gone > alive {
		for _, node := range lost {
			out[node] = verdict{NotReporting, "most nodes went silent together; the controller suspects itself"}
		}
	}
	return out
}
