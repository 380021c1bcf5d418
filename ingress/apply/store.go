package apply

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opfield/availability/ingress/render"
)

const (
	currentLink   = "current"
	generationDir = "gen-"
	unfinished    = ".new-"
)

// write puts a generation on disk and returns its folder. A folder of the
// same ID with the same content is left as it is.
func (c Config) write(g render.Generation) (string, error) {
	dir := filepath.Join(c.Dir, generationDir+g.ID)
	if same(dir, g) {
		return dir, nil
	}
	fresh := filepath.Join(c.Dir, unfinished+g.ID)
	if err := os.RemoveAll(fresh); err != nil {
		return "", fmt.Errorf("clear generation: %w", err)
	}
	for _, f := range g.Files {
		name := filepath.Join(fresh, f.Name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return "", fmt.Errorf("write generation: %w", err)
		}
		if err := writeSynced(name, f.Data); err != nil {
			return "", fmt.Errorf("write generation: %w", err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", fmt.Errorf("replace generation: %w", err)
	}
	if err := os.Rename(fresh, dir); err != nil {
		return "", fmt.Errorf("write generation: %w", err)
	}
	return dir, syncDir(c.Dir)
}

func same(dir string, g render.Generation) bool {
	for _, f := range g.Files {
		have, err := os.ReadFile(filepath.Join(dir, f.Name))
		if err != nil || !bytes.Equal(have, f.Data) {
			return false
		}
	}
	return true
}

func writeSynced(name string, data []byte) error {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Sync(), f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	return errors.Join(d.Sync(), d.Close())
}

// swap makes a generation the current one, in one step. "" removes the link.
func (c Config) swap(id string) error {
	link := filepath.Join(c.Dir, currentLink)
	if id == "" {
		if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove link: %w", err)
		}
		return nil
	}
	fresh := link + ".new"
	if err := os.Remove(fresh); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("swap generation: %w", err)
	}
	if err := os.Symlink(generationDir+id, fresh); err != nil {
		return fmt.Errorf("swap generation: %w", err)
	}
	if err := os.Rename(fresh, link); err != nil {
		return fmt.Errorf("swap generation: %w", err)
	}
	return syncDir(c.Dir)
}

// current returns the ID of the current generation, or "".
func (c Config) current() string {
	target, err := os.Readlink(filepath.Join(c.Dir, currentLink))
	if err != nil {
		return ""
	}
	id, ok := strings.CutPrefix(target, generationDir)
	if !ok {
		return ""
	}
	return id
}

// prune removes all but the newest generations; the current one stays.
func (c Config) prune() error {
	entries, err := os.ReadDir(c.Dir)
	if err != nil {
		return fmt.Errorf("list generations: %w", err)
	}
	type generation struct {
		name string
		at   int64
	}
	var old []generation
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), generationDir) || e.Name() == generationDir+c.current() {
			continue
		}
		if info, err := e.Info(); err == nil {
			old = append(old, generation{e.Name(), info.ModTime().UnixNano()})
		}
	}
	slices.SortFunc(old, func(a, b generation) int { return int(min(max(b.at-a.at, -1), 1)) })
	for i, g := range old {
		if i < keepGenerations-1 {
			continue
		}
		if err := os.RemoveAll(filepath.Join(c.Dir, g.name)); err != nil {
			return fmt.Errorf("remove old generation: %w", err)
		}
	}
	return nil
}
