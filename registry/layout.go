package registry

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
)

func (s storage) top() string { return filepath.Join(s.root, "docker", "registry", "v2") }

func (s storage) repository(name string) string {
	return filepath.Join(s.top(), "repositories", filepath.FromSlash(name))
}

// blob returns the file of a blob.
func (s storage) blob(d digest.Digest) string {
	hex := d.Encoded()
	return filepath.Join(s.top(), "blobs", string(d.Algorithm()), hex[:2], hex, "data")
}

// link returns the folder of a repository's link to a blob.
func (s storage) link(name, kind string, d digest.Digest) string {
	return filepath.Join(s.repository(name), filepath.FromSlash(kind), string(d.Algorithm()), d.Encoded())
}

// readDir is os.ReadDir; what does not exist is empty.
func readDir(dir string) ([]fs.DirEntry, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}

// repositories returns the names of all repositories: folders that have a
// folder whose name begins with '_'.
func (s storage) repositories() ([]string, error) {
	root := filepath.Join(s.top(), "repositories")
	var names []string
	var walk func(name string) error
	walk = func(name string) error {
		entries, err := readDir(filepath.Join(root, filepath.FromSlash(name)))
		if err != nil {
			return err
		}
		found := false
		for _, e := range entries {
			switch {
			case strings.HasPrefix(e.Name(), "_"):
				found = true
			case e.IsDir():
				if err := walk(strings.TrimPrefix(name+"/"+e.Name(), "/")); err != nil {
					return err
				}
			}
		}
		if found {
			names = append(names, name)
		}
		return nil
	}
	return names, walk("")
}

// digests returns the blobs that a repository links to, and since when.
func (s storage) digests(name, kind string) (map[digest.Digest]time.Time, error) {
	top := filepath.Join(s.repository(name), filepath.FromSlash(kind))
	out := map[digest.Digest]time.Time{}
	algorithms, err := readDir(top)
	if err != nil {
		return nil, err
	}
	for _, a := range algorithms {
		entries, err := readDir(filepath.Join(top, a.Name()))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			d := digest.NewDigestFromEncoded(digest.Algorithm(a.Name()), e.Name())
			if err := d.Validate(); err != nil {
				return nil, fmt.Errorf("%s: %w", filepath.Join(top, a.Name(), e.Name()), err)
			}
			at, _, err := newest(filepath.Join(top, a.Name(), e.Name()))
			if err != nil {
				return nil, err
			}
			out[d] = at
		}
	}
	return out, nil
}

// eachBlob calls fn for every stored blob.
func (s storage) eachBlob(fn func(digest.Digest, fs.FileInfo)) error {
	top := filepath.Join(s.top(), "blobs")
	algorithms, err := readDir(top)
	if err != nil {
		return err
	}
	for _, a := range algorithms {
		starts, err := readDir(filepath.Join(top, a.Name()))
		if err != nil {
			return err
		}
		for _, start := range starts {
			entries, err := readDir(filepath.Join(top, a.Name(), start.Name()))
			if err != nil {
				return err
			}
			for _, e := range entries {
				d := digest.NewDigestFromEncoded(digest.Algorithm(a.Name()), e.Name())
				if err := d.Validate(); err != nil {
					return fmt.Errorf("%s: %w", filepath.Join(top, a.Name(), start.Name(), e.Name()), err)
				}
				info, err := os.Stat(s.blob(d))
				if errors.Is(err, fs.ErrNotExist) {
					continue // half written or half removed
				}
				if err != nil {
					return err
				}
				fn(d, info)
			}
		}
	}
	return nil
}

// newest returns when something in a folder was written last, and its size.
func newest(dir string) (at time.Time, size int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if info.ModTime().After(at) {
			at = info.ModTime()
		}
		if !e.IsDir() {
			size += info.Size()
		}
		return nil
	})
	return at, size, err
}
