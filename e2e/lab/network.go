package lab

import (
	"cmp"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
)

// faults is what is broken on the network at the moment; the whole of it is
// written to nftables at every change.
type faults struct {
	cut      map[*Host]bool
	pairs    map[[2]*Host]bool
	loss     map[*Host]int // per cent, each direction
	firewall map[*Host][]uint16
}

func (e *Env) makeBridge() error {
	return errors.Join(
		ip("netns", "add", e.bridge),
		ipBatch(e.bridge, "link set lo up",
			"link add name "+bridgeName+" type bridge forward_delay 0",
			"link set "+bridgeName+" up"),
	)
}

// Cut takes the host off the network: every packet in both directions is
// dropped silently, as if the power of its switch had gone. The host itself
// goes on running.
func (h *Host) Cut() {
	h.env.tb.Helper()
	h.env.change(func(f *faults) { f.cut[h] = true })
}

// CutBetween drops every packet between two hosts.
func (e *Env) CutBetween(a, b *Host) {
	e.tb.Helper()
	e.change(func(f *faults) { f.pairs[pair(a, b)] = true })
}

// HealBetween undoes CutBetween.
func (e *Env) HealBetween(a, b *Host) {
	e.tb.Helper()
	e.change(func(f *faults) { delete(f.pairs, pair(a, b)) })
}

// LosePercent drops that share of the host's packets at random, in each
// direction. 0 ends it.
func (h *Host) LosePercent(percent int) {
	h.env.tb.Helper()
	h.env.change(func(f *faults) {
		f.loss[h] = min(percent, 100)
		if percent <= 0 {
			delete(f.loss, h)
		}
	})
}

// AllowOnly refuses new TCP connections from other hosts to all but the
// ports, like a firewall that drops. It stays until the environment ends.
func (h *Host) AllowOnly(ports ...uint16) {
	h.env.tb.Helper()
	h.env.change(func(f *faults) { f.firewall[h] = ports })
}

// Heal undoes every fault of the host's network, with every other host.
func (h *Host) Heal() {
	h.env.tb.Helper()
	h.env.change(func(f *faults) {
		delete(f.cut, h)
		delete(f.loss, h)
		for p := range f.pairs {
			if p[0] == h || p[1] == h {
				delete(f.pairs, p)
			}
		}
	})
}

func (e *Env) change(edit func(*faults)) {
	e.tb.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.faults.cut == nil {
		e.faults = faults{cut: map[*Host]bool{}, pairs: map[[2]*Host]bool{}, loss: map[*Host]int{}, firewall: map[*Host][]uint16{}}
	}
	edit(&e.faults)
	cmd := exec.Command("ip", "netns", "exec", e.bridge, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(e.faults.ruleset())
	if out, err := cmd.CombinedOutput(); err != nil {
		e.tb.Fatalf("change the network: %v: %s", err, out)
	}
}

func pair(a, b *Host) [2]*Host {
	if a.index > b.index {
		a, b = b, a
	}
	return [2]*Host{a, b}
}

// ruleset renders the faults for nft -f; it replaces the former rules in one
// transaction.
func (f faults) ruleset() string {
	var rules []string
	for h := range f.cut {
		rules = append(rules, fmt.Sprintf("iifname %q drop", h.port), fmt.Sprintf("oifname %q drop", h.port))
	}
	for p := range f.pairs {
		rules = append(rules, fmt.Sprintf("iifname %q oifname %q drop", p[0].port, p[1].port),
			fmt.Sprintf("iifname %q oifname %q drop", p[1].port, p[0].port))
	}
	for h, percent := range f.loss {
		// numgen yields 0 to 999 here, so that 100 per cent is in range too.
		rules = append(rules, fmt.Sprintf("iifname %q numgen random mod 1000 <= %d drop", h.port, percent*10-1),
			fmt.Sprintf("oifname %q numgen random mod 1000 <= %d drop", h.port, percent*10-1))
	}
	for h, ports := range f.firewall {
		if len(ports) == 0 {
			rules = append(rules, fmt.Sprintf("oifname %q tcp flags & (syn|ack) == syn drop", h.port))
			continue
		}
		list := make([]string, len(ports))
		for i, p := range ports {
			list[i] = strconv.Itoa(int(p))
		}
		rules = append(rules, fmt.Sprintf("oifname %q tcp flags & (syn|ack) == syn tcp dport != { %s } drop", h.port, strings.Join(list, ", ")))
	}
	slices.SortFunc(rules, cmp.Compare)
	return "add table bridge fault\ndelete table bridge fault\ntable bridge fault {\n chain forward {\n" +
		"  type filter hook forward priority 0; policy accept;\n  " + strings.Join(rules, "\n  ") + "\n }\n}\n"
}
