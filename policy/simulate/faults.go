package simulate

import (
	"fmt"
	"time"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// fault breaks something and plans its repair.
func (s *run) fault() {
	if s.quiet {
		return
	}
	s.after(s.exp(s.cfg.FaultEvery), s.fault)
	s.result.Faults++
	s.lastFault = s.now
	n := s.pick()
	length := s.between(time.Second, 20*time.Minute)
	if s.chance(0.5) {
		length = s.between(time.Second, 40*time.Second) // about as long as grace and checks
	}
	repair := func(what string, do func()) {
		s.log("fault: %s for %v", what, length.Round(time.Second))
		s.after(length, func() {
			s.log("end of fault: %s", what)
			s.lastFault = s.now
			do()
			if n.reachable() {
				n.confirmed = false
			}
			s.resync(n)
			s.everybody(500 * time.Millisecond)
		})
	}
	switch s.rng.IntN(14) {
	case 0, 1:
		if !n.up {
			return
		}
		s.away(n)
		n.up = false
		n.life++
		for _, r := range n.replicas() {
			r.running, r.acting = false, false
		}
		repair(n.id+" has no power", func() {
			n.up, n.healthy = true, s.now
			for _, r := range n.replicas() {
				r.work() // from its last known state (RDY-4)
			}
		})
	case 2, 3:
		if n.cut || !n.up {
			return
		}
		s.away(n)
		n.cut = true
		repair(n.id+" is cut off", func() { n.cut, n.healthy = false, s.now })
	case 4:
		if n.natsCut {
			return
		}
		n.natsCut = true
		repair(n.id+" is cut off from NATS", func() { n.natsCut, n.healthy = false, s.now })
	case 5:
		if n.hang {
			return
		}
		n.hang = true
		for _, r := range n.replicas() {
			r.report()
		}
		repair("Docker of "+n.id+" hangs", func() {
			n.hang, n.healthy = false, s.now
			for _, r := range n.replicas() {
				r.work()
			}
		})
	case 6, 7:
		s.hurt(n)
	case 8:
		if !s.registry {
			return
		}
		s.registry = false
		repair("the internal registry is away", func() { s.registry = true })
	case 9:
		if s.alive {
			s.kill("by chance")
		}
	case 10:
		if !s.controllerLinked {
			return
		}
		s.controllerLinked = false
		repair("the controller is cut off", func() {
			s.controllerLinked = true
			for _, n := range s.nodes {
				n.healthy = s.now
				s.resync(n)
			}
		})
	case 12:
		if n.late {
			return
		}
		n.late = true
		repair("what "+n.id+" says arrives late", func() { n.late = false })
	case 13:
		if r := n.replicas(); len(r) > 0 && !r[0].hang {
			r[0].hang = true
			r[0].report()
			repair("Docker of "+n.id+" hangs on "+r[0].workload, func() {
				r[0].hang = false
				r[0].work()
			})
		}
	case 11:
		if !s.ingress {
			return
		}
		s.ingress, s.ingressSilent = false, s.now
		s.everybody(10 * time.Second)
		length = min(length, time.Minute)
		repair("an ingress node confirms nothing", func() { s.ingress = true })
	}
}

// away notes when a node was heard last.
func (s *run) away(n *node) {
	n.lostAt = s.now.Add(-s.between(0, 2*time.Second))
	s.everybody(s.between(5*time.Second, 6*time.Second))
	s.everybody(5 * time.Second)
}

// hurt does something to one container.
func (s *run) hurt(n *node) {
	for _, w := range s.policies {
		r := n.copies[w.name]
		if r == nil || !r.exists || !n.up || s.chance(0.4) {
			continue
		}
		switch s.rng.IntN(3) {
		case 0:
			s.log("fault: somebody removes %s on %s", w.name, n.id)
			r.forget()
			r.work()
		case 1:
			s.log("fault: %s crashes on %s", w.name, n.id)
			r.running = false
			s.after(s.between(0, 3*time.Second), r.work)
			r.report()
		case 2:
			long := s.between(time.Second, 5*time.Minute)
			s.log("fault: %s on %s is unhealthy for %v", w.name, n.id, long.Round(time.Second))
			r.sick = true
			r.report()
			s.after(long, func() { r.sick = false; s.lastFault = s.now; r.report() })
		}
		return
	}
}

// user changes their mind about one policy.
func (s *run) user(w *workload) {
	if s.quiet {
		return
	}
	s.after(s.exp(s.cfg.UserEvery), func() { s.user(w) })
	if !w.exists || !s.alive || !s.controllerLinked {
		return
	}
	s.result.Actions++
	doc := w.doc
	doc.Operations = append([]policy.Operation(nil), doc.Operations...)
	world := s.world(w)
	var err *policy.Refusal
	what := ""
	switch s.rng.IntN(15) {
	case 0, 1, 2:
		t := s.settings()
		what = "settings " + describe(t)
		_, err = doc.Update(s.now, t)
	case 3, 4, 5, 6:
		value := fmt.Sprint(s.rng.IntN(1000))
		var op policy.Operation
		if op, err = doc.Rollout(s.now, policy.Change{Env: map[string]*string{"V": &value}}); err == nil {
			what += fmt.Sprintf("rollout to generation %d", op.Target)
			for i := range doc.Versions {
				if v := &doc.Versions[i]; v.Generation == op.Target && s.chance(0.5) {
					v.Image, v.Source, v.SourceNode = placement.Image{}, fmt.Sprintf("img-%d", op.Target), ""
					if n := s.pick(); s.chance(0.1) {
						what += ", which " + n.id + " cannot pull"
						n.noPull["sha256:"+v.Source] = true
					}
				}
			}
			if s.chance(0.3) {
				w.bad[op.Target] = true
				what += " (broken)"
			}
		}
	case 7:
		what = "stop"
		_, err = doc.Do(s.now, policy.Stop)
	case 8, 9:
		what = "start"
		_, err = doc.Do(s.now, policy.Start)
	case 10:
		what = "restart"
		_, err = doc.Do(s.now, policy.Restart)
	case 11:
		what = "retry"
		_, err = doc.Retry(s.now, "")
	case 12:
		n := s.pick()
		n.drained = !n.drained
		s.log("user: drain of %s: %t", n.id, n.drained)
		s.everybody(0)
		return
	case 14:
		n := s.pick()
		if n.reachable() || n.confirmed {
			return
		}
		n.confirmed, n.lostAt, s.lastFault = true, s.now, s.now
		s.log("user: %s is confirmed to be lost", n.id)
		s.everybody(0)
		return
	case 13:
		if !s.chance(0.3) || len(doc.Placements) == 0 {
			return
		}
		survivor := doc.Placements[s.rng.IntN(len(doc.Placements))].Node
		what = "disable, survivor " + survivor
		_, err = doc.Disable(s.now, policy.DisableRequest{Survivor: survivor, Confirm: w.name}, world)
	}
	if err != nil {
		s.log("user: %s %s refused: %v", what, w.name, err)
		return
	}
	s.log("user: %s %s", what, w.name)
	w.doc, w.changed = doc, s.now
	s.remember(w)
	s.decide(w)
}
