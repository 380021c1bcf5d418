package apply

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// commandTimeout bounds `nginx -t`, a start and a reload command.
const commandTimeout = 2 * time.Minute

var (
	emergPattern = regexp.MustCompile(`\[emerg\].*`)
	warnPattern  = regexp.MustCompile(`\[(warn|error|crit|alert)\].*`)
	bindPattern  = regexp.MustCompile(`bind\(\) to \S*?:(\d+) failed`)
	pidPrefix    = regexp.MustCompile(`(\[[a-z]+\]) (\d+#\d+: )?(\*\d+ )?`)
)

func (c Config) pidFile() string {
	if c.Include {
		return c.PIDFile
	}
	return filepath.Join(c.RunDir, "nginx.pid")
}

func (c Config) errorLog() string {
	if c.ErrorLog != "" || c.Include {
		return c.ErrorLog
	}
	return filepath.Join(c.LogDir, "error.log")
}

// master opens the nginx master that the pid file names, after checking that
// it is one: a pid may have been given to another process since.
func (c Config) master() (*os.File, error) {
	text, err := os.ReadFile(c.pidFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil, ErrNotRunning
	}
	if err != nil {
		return nil, fmt.Errorf("read pid file: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid <= 1 {
		return nil, ErrNotRunning // nginx -t leaves an empty pid file
	}
	// The descriptor stays with this process, whoever gets the pid later.
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil, ErrNotRunning
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	proc := os.NewFile(uintptr(fd), "pidfd")
	if err := c.isMaster(pid); err != nil {
		_ = proc.Close()
		return nil, err
	}
	return proc, nil
}

func (c Config) isMaster(pid int) error {
	dir := fmt.Sprintf("/proc/%d", pid)
	exe, err := os.Readlink(dir + "/exe")
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return ErrNotRunning
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotNginx, err)
	}
	exe = strings.TrimSuffix(exe, " (deleted)") // replaced by an upgrade
	want, err := filepath.EvalSymlinks(c.Binary)
	if err != nil {
		return fmt.Errorf("find nginx: %w", err)
	}
	line, err := os.ReadFile(dir + "/cmdline")
	if err != nil || len(line) == 0 {
		return ErrNotRunning // a zombie
	}
	switch {
	case exe != want && filepath.Base(exe) != filepath.Base(want):
		return fmt.Errorf("%w: process %d is %s", ErrNotNginx, pid, filepath.Base(exe))
	case !bytes.Contains(line, []byte("master process")):
		return fmt.Errorf("%w: process %d is no nginx master", ErrNotNginx, pid)
	case !c.Include && !bytes.Contains(line, []byte(c.currentMain())):
		return fmt.Errorf("%w: process %d is an nginx with another main file", ErrNotNginx, pid)
	}
	return nil
}

func (c Config) currentMain() string { return filepath.Join(c.Dir, currentLink, "nginx.conf") }

func (c Config) signal(sig unix.Signal) error {
	proc, err := c.master()
	if err != nil {
		return err
	}
	defer proc.Close()
	if err := unix.PidfdSendSignal(int(proc.Fd()), sig, nil, 0); err != nil {
		return fmt.Errorf("signal nginx: %w", err)
	}
	return nil
}

func (c Config) reload(ctx context.Context) error {
	if c.Include && len(c.ReloadCommand) > 0 {
		out, err := run(ctx, c.ReloadCommand[0], c.ReloadCommand[1:]...)
		if err != nil {
			return fmt.Errorf("reload command: %w: %s", err, firstLine(out))
		}
		return nil
	}
	return c.signal(unix.SIGHUP)
}

// test has nginx check a main file. Warnings are refusals too: a table that
// is too small today is an outage tomorrow.
func (c Config) test(ctx context.Context, main string) error {
	args := []string{"-t"}
	if !c.Include {
		args = append(args, "-e", c.errorLog(), "-p", c.RunDir)
	}
	if main != "" {
		args = append(args, "-c", main)
	}
	out, err := run(ctx, c.Binary, args...)
	if line := refusalLine(out); line != "" && (err != nil || !c.Include || strings.Contains(line, c.Dir) || strings.Contains(line, "could not build optimal")) {
		return newRefusal(line)
	}
	if err != nil {
		return fmt.Errorf("%w: %w: %s", ErrRefused, err, firstLine(out))
	}
	return nil
}

// start starts our own nginx, which puts itself into the background.
func (c Config) start(ctx context.Context) error {
	if err := c.removeSockets(); err != nil {
		return err
	}
	out, err := run(ctx, c.Binary, "-e", c.errorLog(), "-p", c.RunDir, "-c", c.currentMain())
	if err != nil {
		if line := refusalLine(out); line != "" {
			return newRefusal(line)
		}
		return fmt.Errorf("start nginx: %w: %s", err, firstLine(out))
	}
	return nil
}

// removeSockets clears what an nginx that was killed left behind: bind fails
// on a socket file that exists.
func (c Config) removeSockets() error {
	old, err := filepath.Glob(filepath.Join(c.SocketDir, "*.sock"))
	if err != nil {
		return fmt.Errorf("list sockets: %w", err)
	}
	for _, s := range old {
		if err := os.Remove(s); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove old socket: %w", err)
		}
	}
	return nil
}

func run(ctx context.Context, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	// The daemon keeps the descriptors it inherits; it must not keep a pipe
	// that somebody waits on.
	log, err := os.CreateTemp("", "opfield-nginx-*.log")
	if err != nil {
		return nil, fmt.Errorf("collect output: %w", err)
	}
	defer os.Remove(log.Name())
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	err = cmd.Run()
	out, readErr := os.ReadFile(log.Name())
	return out, errors.Join(err, readErr)
}

// refusalLine returns the line that says why, cleaned of process numbers.
func refusalLine(out []byte) string {
	line := emergPattern.Find(out)
	if line == nil {
		line = warnPattern.Find(out)
	}
	return pidPrefix.ReplaceAllString(strings.TrimSpace(string(line)), "$1 ")
}

func newRefusal(line string) *Refusal {
	r := &Refusal{Line: line}
	if m := bindPattern.FindStringSubmatch(line); m != nil {
		if n, err := strconv.ParseUint(m[1], 10, 16); err == nil {
			r.Port = uint16(n)
		}
	}
	return r
}

func firstLine(out []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return line
}
