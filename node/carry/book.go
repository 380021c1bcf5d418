package carry

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/opfield/availability/placement"
)

// memory is what must survive a restart about one workload. It holds the
// environment of the workload: a secret.
type memory struct {
	Desired *placement.Desired `json:"desired,omitempty"`
	// Current is the full id of the container that counts; empty: there is
	// none, or we removed it.
	Current    string `json:"current,omitempty"`
	Generation uint64 `json:"generation,omitempty"` // of Current
	Adopted    string `json:"adopted,omitempty"`    // full id; it may be gone by now
	AdoptedAt  uint64 `json:"adoptedAt,omitempty"`
	// Policy is the restart policy that the adopted container came with.
	Policy *container.RestartPolicy `json:"policy,omitempty"`
	// Released are full ids that are not ours, whatever their labels say, and
	// ReleasedAs what they were, so that their events go on in order.
	Released   []string           `json:"released,omitempty"`
	ReleasedAs *placement.Desired `json:"releasedAs,omitempty"` // without its Spec

	// Restarts counts what Desired.Restarts asked for and was done; Restarting
	// is the start that one in progress is to replace.
	Restarts   uint64 `json:"restarts,omitempty"`
	Restarting string `json:"restarting,omitempty"`
	Pulled     string `json:"pulled,omitempty"` // digest that was on the node

	// Pulls are the images that came from the internal registry, and Left when
	// the node had a placement last; zero: it has one.
	Pulls []pull    `json:"pulls,omitempty"`
	Left  time.Time `json:"left,omitzero"`

	// Mirror is what Mirrored answers, and MirroredAt the revision of the record
	// that asked for it.
	Mirror     *placement.Mirror `json:"mirror,omitempty"`
	Mirrored   *placement.Image  `json:"mirrored,omitempty"`
	MirroredAt uint64            `json:"mirroredAt,omitempty"`

	Outside       string `json:"outside,omitempty"`
	OutsideNumber uint64 `json:"outsideNumber,omitempty"`
}

func (m memory) released(id string) bool { return slices.Contains(m.Released, id) }

// book keeps the memories on disk.
type book struct {
	path string

	disk sync.Mutex // held while a change is written; readers do not wait for it

	mu    sync.Mutex
	pages map[string]memory // guarded by mu, replaced as a whole; by workload
}

// openBook reads the file. What is unreadable is set aside: the controller
// tells what is desired again, and labels tell what is owned.
func openBook(path string, logger *slog.Logger) *book {
	b := &book{path: path, pages: map[string]memory{}}
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &b.pages)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		logger.Warn("desired state not readable, beginning anew", "path", path, "err", err)
		if err := os.Rename(path, path+".broken"); err != nil {
			logger.Warn("unreadable desired state not kept", "path", path, "err", err)
		}
		b.pages = map[string]memory{}
	}
	maps.DeleteFunc(b.pages, func(workload string, m memory) bool {
		return placement.CheckName(workload) != nil || m.Desired != nil && m.Desired.Check() != nil
	})
	return b
}

func (b *book) read(workload string) memory {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pages[workload]
}

func (b *book) all() map[string]memory {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.pages)
}

// write changes one memory, on disk before anybody can read it.
func (b *book) write(workload string, edit func(*memory)) error {
	return b.edit(func(pages map[string]memory) {
		m := pages[workload]
		edit(&m)
		pages[workload] = m
	})
}

func (b *book) edit(edit func(map[string]memory)) error {
	b.disk.Lock()
	defer b.disk.Unlock()
	next := b.all()
	edit(next)
	data, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("keep desired state: %w", err)
	}
	if err := replaceFile(b.path, data); err != nil {
		return fmt.Errorf("keep desired state: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pages = next
	return nil
}

// replaceFile writes a file that only we can read, in one step that survives
// a power cut.
func replaceFile(path string, data []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*") // 0600
	if err != nil {
		return err
	}
	_, err = tmp.Write(data)
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name()) // the first error counts
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
