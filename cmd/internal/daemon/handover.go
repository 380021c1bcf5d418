package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/cloudflare/tableflip"

	"github.com/opfield/availability/securelink"
)

// Handover passes listening sockets to a successor: on SIGHUP the program
// starts its own (maybe newer) binary, which takes them over; the old process
// then finishes what runs.
type Handover struct {
	*tableflip.Upgrader
}

// NewHandover returns a Handover for listeners whose peers speak first; pidFile, if not empty, always holds the
// process id of the newest process.
func NewHandover(pidFile string) (*Handover, error) {
	u, err := tableflip.New(tableflip.Options{PIDFile: pidFile, ListenConfig: securelink.ListenConfig()})
	if err != nil {
		return nil, fmt.Errorf("handover: %w", err)
	}
	return &Handover{u}, nil
}

// Run waits until a successor has taken over, or ctx is done. It reports
// whether there is a successor.
func (h *Handover) Run(ctx context.Context, log *slog.Logger) (succeeded bool, err error) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	if err := h.Ready(); err != nil {
		return false, errors.Join(err, errors.New("handover: the predecessor did not let go"))
	}
	for {
		select {
		case <-ctx.Done():
			return false, nil
		case <-h.Exit():
			return true, nil
		case <-hup:
			if err := h.Upgrade(); err != nil {
				log.Error("restart failed, going on as before", "err", err)
			}
		}
	}
}
