package demo

import (
	"fmt"
	"io"
	"slices"
	"sync"
)

// host stands where a test stands for package lab.
type host struct {
	out io.Writer

	mu       sync.Mutex
	cleanups []func()
	reason   string
}

// giveUp unwinds a demo that cannot go on.
type giveUp struct{}

func (*host) Helper() {}

func (*host) Logf(string, ...any) {}

func (h *host) Fatalf(format string, args ...any) {
	h.mu.Lock()
	h.reason = fmt.Sprintf(format, args...)
	h.mu.Unlock()
	panic(giveUp{})
}

// forgive returns the reason of a giveUp that does not end the demo.
func (h *host) forgive() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	reason := h.reason
	h.reason = ""
	return reason
}

func (h *host) Cleanup(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cleanups = append(h.cleanups, f)
}

func (h *host) Failed() bool { return false }

func (h *host) close() {
	h.mu.Lock()
	all := slices.Clone(h.cleanups)
	h.cleanups = nil
	h.mu.Unlock()
	for _, f := range slices.Backward(all) {
		f()
	}
}
