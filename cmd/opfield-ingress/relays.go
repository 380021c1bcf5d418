package main

import (
	"sync"
	"time"

	"github.com/opfield/availability/ingress"
	"github.com/opfield/availability/securelink"
	"github.com/opfield/availability/upstream"
)

// relayNews takes what the relays say to the ingress loop.
type relayNews struct {
	inbox *ingress.Inbox

	mu    sync.Mutex
	young map[string]*time.Timer // relays whose silence does not count yet
}

// Up implements securelink.Watcher.
func (n *relayNews) Up(relay string, age time.Duration, links []securelink.Report, _ []securelink.NodeSession) {
	left := securelink.YoungRelay - age
	reports := make([]upstream.LinkReport, 0, len(links))
	for _, l := range links {
		reports = append(reports, linkReport(l))
	}
	n.inbox.Session(relay, left <= 0, reports)
	if left <= 0 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if old := n.young[relay]; old != nil {
		old.Stop()
	}
	n.young[relay] = time.AfterFunc(left, func() {
		n.mu.Lock()
		_, still := n.young[relay]
		delete(n.young, relay)
		n.mu.Unlock()
		if still {
			n.inbox.Relay(relay, true, true)
		}
	})
}

// Report implements securelink.Watcher.
func (n *relayNews) Report(relay string, r securelink.Report) {
	n.inbox.Links(relay, []upstream.LinkReport{linkReport(r)})
}

// NodeSession implements securelink.Watcher. What a lost session means for
// its links comes as reports.
func (n *relayNews) NodeSession(string, securelink.NodeSession) {}

// Down implements securelink.Watcher.
func (n *relayNews) Down(relay string, _ time.Duration) {
	n.mu.Lock()
	if t := n.young[relay]; t != nil {
		t.Stop()
		delete(n.young, relay)
	}
	n.mu.Unlock()
	n.inbox.Relay(relay, false, false)
}

func linkReport(r securelink.Report) upstream.LinkReport {
	return upstream.LinkReport{
		Link: r.Link, Order: r.Order, Role: r.Role, Ready: r.Ready, State: r.State, Protocol: r.Protocol, Present: r.Present,
	}
}
