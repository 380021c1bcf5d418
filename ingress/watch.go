package ingress

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/opfield/availability/ingress/render"
)

// Timing of the watch (RTE-9: a change is applied within a second).
const (
	settle      = 100 * time.Millisecond // a file that is being written is left alone this long
	settleLimit = 400 * time.Millisecond
	rewatch     = 10 * time.Second // what a symbolic link leads to may have moved unseen
)

// maxUserFile bounds one of the user's files.
const maxUserFile = 4 << 20

// readOutside reads the user's templates and nginx files.
func (l *loop) readOutside() outside {
	o := outside{templates: map[string]string{}}
	for name, text := range readFiles(l.config.TemplateDir, ".tmpl") {
		o.templates[name] = string(text)
	}
	for name, text := range readFiles(l.config.UserHTTP, ".conf") {
		o.files = append(o.files, render.File{Name: render.UserHTTP + "/" + name, Data: text})
	}
	for name, text := range readFiles(l.config.UserStream, ".conf") {
		o.files = append(o.files, render.File{Name: render.UserStream + "/" + name, Data: text})
	}
	slices.SortFunc(o.files, func(a, b render.File) int { return strings.Compare(a.Name, b.Name) })
	o.identity = l.identity()
	o.digest = digestOf(o)
	return o
}

// identity is a digest of the certificates that nginx reads when it loads.
func (l *loop) identity() string {
	sum := sha256.New()
	for _, name := range []string{l.config.Render.ClientCert, l.config.Render.ClientCA} {
		text, err := os.ReadFile(name)
		if err != nil {
			text = nil // nginx -t says it better
		}
		fmt.Fprintf(sum, "%d\n%s", len(text), text)
	}
	return hex.EncodeToString(sum.Sum(nil))[:16]
}

// readFiles returns the regular files of a folder by name; links are followed.
func readFiles(dir, suffix string) map[string][]byte {
	out := map[string][]byte{}
	if dir == "" {
		return out
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return out
	}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		info, err := os.Stat(name)
		if !strings.HasSuffix(e.Name(), suffix) || err != nil || !info.Mode().IsRegular() || info.Size() > maxUserFile {
			continue
		}
		if text, err := os.ReadFile(name); err == nil {
			out[e.Name()] = text
		}
	}
	return out
}

func digestOf(o outside) string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%s\n", o.identity)
	for _, f := range o.files {
		fmt.Fprintf(sum, "%s %d\n%s", f.Name, len(f.Data), f.Data)
	}
	for _, name := range slices.Sorted(maps.Keys(o.templates)) {
		fmt.Fprintf(sum, "%s %d\n%s", name, len(o.templates[name]), o.templates[name])
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// filesChanged takes changes of files outside into account.
func (l *loop) filesChanged() {
	next := l.readOutside()
	if next.digest != l.outside.digest {
		l.outside = next
	}
	l.loadCertificates()
}

// watchedPaths are the files and folders whose changes matter.
func (l *loop) watchedPaths() []string {
	out := []string{l.config.Render.ClientCert, l.config.Render.ClientCA}
	for _, dir := range []string{l.config.TemplateDir, l.config.UserHTTP, l.config.UserStream} {
		if dir != "" {
			out = append(out, filepath.Join(dir, "x"))
		}
	}
	for _, v := range l.table.Routes() {
		if t := v.Route.TLS; t != nil && t.CertFile != "" {
			out = append(out, t.CertFile, t.KeyFile)
		}
	}
	return out
}

// watcher follows the folders of files. A watch on a file itself dies with
// the first rename onto it, so folders are watched: the one that the path
// names and the one that its symbolic links lead to.
type watcher struct {
	notify *fsnotify.Watcher
	dirs   map[string]bool
}

func newWatcher() (*watcher, error) {
	n, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch files: %w", err)
	}
	return &watcher{notify: n, dirs: map[string]bool{}}, nil
}

// run calls changed after every change of a watched folder, once it settled.
// paths says what to watch; kick makes it look again.
func (w *watcher) run(ctx context.Context, paths func() []string, kick <-chan struct{}, changed func()) error {
	defer w.notify.Close()
	tick := time.NewTicker(rewatch)
	defer tick.Stop()
	var first time.Time
	quiet := time.NewTimer(time.Hour)
	quiet.Stop()
	w.update(paths())
	touched := func() {
		now := time.Now()
		if first.IsZero() {
			first = now
		}
		quiet.Reset(min(settle, max(0, first.Add(settleLimit).Sub(now))))
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, ok := <-w.notify.Events:
			if !ok {
				return nil
			}
			touched()
		case <-w.notify.Errors:
			touched() // events may be missing: look at everything
		case <-kick:
			w.update(paths())
		case <-tick.C:
			if w.update(paths()) {
				touched()
			}
		case <-quiet.C:
			first = time.Time{}
			w.update(paths())
			changed()
		}
	}
}

// update watches the folders of the paths and reports whether any is new.
func (w *watcher) update(paths []string) bool {
	want := map[string]bool{}
	for _, p := range paths {
		dir := filepath.Dir(p)
		want[dir] = true
		if real, err := filepath.EvalSymlinks(p); err == nil {
			want[filepath.Dir(real)] = true
		} else if real, err := filepath.EvalSymlinks(dir); err == nil {
			want[real] = true
		}
		// A folder that is itself swapped by a symbolic link changes in its parent.
		want[filepath.Dir(dir)] = true
	}
	for dir := range w.dirs {
		if !want[dir] {
			_ = w.notify.Remove(dir) // it may be gone already
			delete(w.dirs, dir)
		}
	}
	grown := false
	for dir := range want {
		if !w.dirs[dir] && w.notify.Add(dir) == nil {
			w.dirs[dir] = true
			grown = true
		}
	}
	return grown
}
