package lab

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// newKey returns "ofe-<pid>-<start time>-<random>": whether its owner is alive
// can be seen from the name alone.
func newKey() (string, error) {
	start, err := startTime(os.Getpid())
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s%d-%s-%s", keyPrefix, os.Getpid(), start, strings.ToLower(rand.Text()[:6])), nil
}

// startTime returns when a process began, in clock ticks since boot.
func startTime(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// The command, field 2, may contain anything; the rest follows its ')'.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 20 {
		return "", errors.New("unexpected /proc/pid/stat")
	}
	return fields[19], nil
}

// RemoveStale removes what environments of dead processes left behind.
func RemoveStale() error {
	lock, err := os.OpenFile(filepath.Join(rootDir, keyPrefix+"lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	keys := map[string]bool{}
	for _, dir := range []string{rootDir, netnsDir} {
		found, err := filepath.Glob(filepath.Join(dir, keyPrefix+"*"))
		if err != nil {
			return err
		}
		for _, path := range found {
			part := strings.SplitN(filepath.Base(path), "-", 5)
			if len(part) < 4 {
				continue
			}
			pid, err := strconv.Atoi(part[1])
			if err != nil {
				continue
			}
			if start, err := startTime(pid); err == nil && start == part[2] {
				continue // its owner lives
			}
			keys[strings.Join(part[:4], "-")] = true
		}
	}
	var errs []error
	for key := range keys {
		errs = append(errs, sweep(key))
	}
	return errors.Join(errs...)
}

// sweep ends every process of an environment and removes its mounts,
// namespaces, control groups and files.
func sweep(key string) error {
	dir := filepath.Join(rootDir, key)
	killAll(key+"-*", key, "*")
	containers, _ := filepath.Glob(filepath.Join(dir, "*", "docker", "data", "containers", "*"))
	for _, mount := range mountsBelow(dir) {
		_ = unix.Unmount(mount, unix.MNT_DETACH) // removing the directory reports what stayed
	}
	for _, c := range containers {
		groups, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup/*/docker", filepath.Base(c)))
		for _, g := range append(groups, filepath.Join("/sys/fs/cgroup/docker", filepath.Base(c))) {
			_ = unix.Rmdir(g) // not there, or gone with its last process
		}
	}
	var errs []error
	namespaces, _ := filepath.Glob(filepath.Join(netnsDir, key+"-*"))
	for _, path := range namespaces {
		errs = append(errs, ip("netns", "del", filepath.Base(path)))
	}
	errs = append(errs, os.RemoveAll(dir))
	return errors.Join(errs...)
}

// killAll ends every process of the hosts that the patterns name, until none
// is left.
func killAll(netns, key, host string) {
	for range 50 {
		pids := processesOf(netns, key, host)
		if len(pids) == 0 {
			return
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may just have ended
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// processesOf finds the processes that run in the network namespaces of hosts
// and their containers or have the host's directory in their command line
// (engines and their shims), and all their descendants. The host is a name or
// "*".
func processesOf(netns, key, host string) []int {
	dir := filepath.Join(rootDir, key)
	needle := []byte(dir + "/")
	if host != "*" {
		needle = []byte(filepath.Join(dir, host) + "/")
	}
	spaces := map[string]bool{}
	paths, _ := filepath.Glob(filepath.Join(netnsDir, netns))
	inner, _ := filepath.Glob(filepath.Join(dir, host, "docker", "exec", "netns", "*"))
	for _, path := range append(paths, inner...) {
		var st unix.Stat_t
		if unix.Stat(path, &st) == nil {
			spaces[fmt.Sprintf("net:[%d]", st.Ino)] = true
		}
	}
	parents := map[int]int{}
	ours := map[int]bool{}
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil {
			if f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:])); len(f) > 1 && f[0] != "Z" {
				parents[pid], _ = strconv.Atoi(f[1])
			} else {
				continue // already dead
			}
		}
		space, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if spaces[space] || (ownsCommand(cmdline) && bytes.Contains(cmdline, needle)) {
			ours[pid] = true
		}
	}
	for grown := true; grown; {
		grown = false
		for pid, parent := range parents {
			if ours[parent] && !ours[pid] {
				ours[pid], grown = true, true
			}
		}
	}
	var pids []int
	for pid := range ours {
		pids = append(pids, pid)
	}
	slices.Sort(pids)
	return pids
}

// ownsCommand keeps a person's editor or pager on one of our files alive: only
// the parts of an engine are known by their command line.
func ownsCommand(cmdline []byte) bool {
	name, _, _ := bytes.Cut(cmdline, []byte{0})
	switch filepath.Base(string(name)) {
	case "dockerd", "containerd", "containerd-shim-runc-v2", "docker-proxy", "runc":
		return true
	}
	return false
}

// mountsBelow lists the mount points below a directory, deepest first.
func mountsBelow(dir string) []string {
	b, err := fs.ReadFile(os.DirFS("/proc/self"), "mountinfo")
	if err != nil {
		return nil
	}
	var found []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			found = append(found, f[4])
		}
	}
	slices.Reverse(found)
	return found
}
