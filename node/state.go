package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/opfield/availability/placement"
)

// state is what the agent remembers over a restart.
type state struct {
	Incarnation uint64   `json:"incarnation"`
	Workloads   []string `json:"workloads"` // announced, to be told when they are gone
	// Generations are the newest of placements that were managed: what follows
	// them is announced as no older one, or nobody would believe it.
	Generations map[string]uint64 `json:"generations,omitempty"`
}

// loadState reads the file. What is unreadable is as good as nothing: the
// stored events still raise the incarnation.
func loadState(path string, logger *slog.Logger) state {
	var s state
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		logger.Warn("state file not readable, beginning anew", "path", path, "err", err)
		return state{}.ready()
	}
	kept := s.Workloads[:0]
	for _, w := range s.Workloads {
		if placement.CheckName(w) == nil {
			kept = append(kept, w)
		}
	}
	s.Workloads = kept
	return s.ready()
}

func (s state) ready() state {
	if s.Generations == nil {
		s.Generations = map[string]uint64{}
	}
	return s
}

// save replaces the file in one step.
func (s state) save(path string) error {
	b, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("store agent state: %w", err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("store agent state: %w", err)
	}
	_, err = tmp.Write(b)
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name()) // the first error counts
		return fmt.Errorf("store agent state: %w", err)
	}
	return nil
}
