package apply

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"
)

// Errors that callers branch on.
var (
	// ErrRefused: nginx does not take this configuration.
	ErrRefused = errors.New("nginx refused the configuration")
	// ErrNotProven: the status socket did not answer with the new generation.
	ErrNotProven = errors.New("the new generation did not answer")
	// ErrNotNginx: the process that the pid file names is not our nginx.
	ErrNotNginx = errors.New("the pid file names another process")
	// ErrNotRunning: there is no nginx to reload.
	ErrNotRunning = errors.New("nginx is not running")
)

// Refusal is an ErrRefused with what nginx said.
type Refusal struct {
	Line string // the first [emerg] line or warning
	Port uint16 // the port that could not be bound; 0 if it was something else
}

// Error returns nginx's own line.
func (r *Refusal) Error() string { return fmt.Sprintf("%v: %s", ErrRefused, r.Line) }

// Is makes errors.Is(err, ErrRefused) true.
func (r *Refusal) Is(target error) bool { return target == ErrRefused }

// Config says which nginx is driven, and how. With Include it is the user's:
// its main file includes Dir/current/http.conf and stream.conf.
type Config struct {
	Binary    string
	Dir       string // folder of the generations and of the link "current"
	RunDir    string
	LogDir    string
	SocketDir string // status.sock is in it
	ErrorLog  string // where nginx says why it refused a reload

	Include       bool
	MainFile      string   // Include: nginx's main file; "" = built in
	PIDFile       string   // Include: of the master
	ReloadCommand []string // Include: used instead of a signal

	ProveWithin time.Duration // DefaultProveWithin
}

// DefaultProveWithin bounds how long a reload may take to be proven.
const DefaultProveWithin = 5 * time.Second

// keepGenerations is how many generations stay on disk.
const keepGenerations = 3

// Validate reports the first field that cannot be used.
func (c Config) Validate() error {
	for _, p := range []struct{ name, value string }{
		{"Dir", c.Dir}, {"SocketDir", c.SocketDir}, {"Binary", c.Binary},
	} {
		if !filepath.IsAbs(p.value) {
			return fmt.Errorf("%s: want an absolute path", p.name)
		}
	}
	if c.Include {
		if c.PIDFile == "" {
			return fmt.Errorf("PIDFile: wanted in include mode; name the pid file of your nginx")
		}
	} else if !filepath.IsAbs(c.RunDir) || !filepath.IsAbs(c.LogDir) {
		return fmt.Errorf("RunDir, LogDir: want absolute paths")
	}
	return nil
}
