package lab

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Process is a program started inside a host. It can be started again after
// it ended; its log goes on in the same file.
type Process struct {
	host *Host
	name string
	argv []string
	env  []string
	log  string // path

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{} // closed when the present run ended
	err  error         // of the last run
}

// Start starts a program inside the host. Its output goes to a log file, of
// which the end is printed if the test fails.
func (h *Host) Start(name string, argv ...string) *Process {
	h.env.tb.Helper()
	return h.StartEnv(name, nil, argv...)
}

// StartEnv is Start with further environment variables ("KEY=value").
func (h *Host) StartEnv(name string, env []string, argv ...string) *Process {
	h.env.tb.Helper()
	p := &Process{host: h, name: name, argv: argv, env: env, log: h.Path(name + ".log")}
	h.env.adopt(p)
	p.Start()
	return p
}

// Start starts the program again after it ended.
func (p *Process) Start() {
	p.host.env.tb.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done != nil && !closed(p.done) {
		p.host.env.tb.Fatalf("start %s on %s: it runs already", p.name, p.host.name)
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		p.host.env.tb.Fatalf("open log: %v", err)
	}
	defer log.Close()
	cmd := exec.Command(p.argv[0], p.argv[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.host.dir, log, log
	cmd.Env = append(os.Environ(), p.env...)
	// Its own process group: a Ctrl-C at the terminal is ours to handle.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.host.Enter(cmd.Start); err != nil {
		p.host.env.tb.Fatalf("start %s on %s: %v", p.name, p.host.name, err)
	}
	done := make(chan struct{})
	p.cmd, p.done = cmd, done
	go func() {
		err := cmd.Wait()
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(done)
	}()
}

// Pid returns the process id of the present or last run.
func (p *Process) Pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.Process.Pid
}

// Running reports whether the program runs.
func (p *Process) Running() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !closed(p.done)
}

// Done is closed when the present run ends.
func (p *Process) Done() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.done
}

// Signal sends a signal; a program that ended already gets none.
func (p *Process) Signal(sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !closed(p.done) {
		_ = p.cmd.Process.Signal(sig) // the only error is that it just ended
	}
}

// Kill ends the program with SIGKILL and waits for its end.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.Done()
}

// Stop ends the program with SIGTERM, waits for its end, and kills it after
// the time. It reports whether it ended by itself.
func (p *Process) Stop(within time.Duration) bool {
	p.Signal(syscall.SIGTERM)
	select {
	case <-p.Done():
		return true
	case <-time.After(within):
		p.Kill()
		return false
	}
}

// Restart stops the program and starts it again.
func (p *Process) Restart(within time.Duration) {
	p.host.env.tb.Helper()
	p.Stop(within)
	p.Start()
}

// Pause freezes the program (SIGSTOP): its kernel still acknowledges. It
// returns when every thread stands still.
func (p *Process) Pause() {
	p.Signal(syscall.SIGSTOP)
	for start := time.Now(); p.Running() && !stopped(p.Pid()) && time.Since(start) < time.Second; {
		time.Sleep(time.Millisecond)
	}
}

// stopped reports whether every thread of a process is stopped by a signal.
func stopped(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, path := range threads {
		b, err := os.ReadFile(path)
		// The state follows the command, which may contain anything.
		if i := strings.LastIndexByte(string(b), ')'); err == nil && i > 0 && !strings.HasPrefix(string(b[i+1:]), " T") {
			return false
		}
	}
	return len(threads) > 0
}

// Continue undoes Pause.
func (p *Process) Continue() { p.Signal(syscall.SIGCONT) }

// Log returns everything the program printed so far.
func (p *Process) Log() string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return fmt.Sprintf("(no log: %v)", err)
	}
	return string(b)
}

// Logged reports whether the program printed the text.
func (p *Process) Logged(text string) bool { return strings.Contains(p.Log(), text) }

func (p *Process) state() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !closed(p.done):
		return fmt.Sprintf("running, pid %d", p.cmd.Process.Pid)
	case p.err != nil:
		return "ended: " + p.err.Error()
	default:
		return "ended"
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
