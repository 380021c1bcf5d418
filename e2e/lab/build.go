package lab

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Binary builds a command of this module ("./cmd/opfield-node") as a static
// program and returns its path. Go's own check makes the second call cheap.
func (e *Env) Binary(pkg string) string {
	e.tb.Helper()
	path, err := buildBinary(pkg)
	if err != nil {
		e.tb.Fatalf("build %s: %v", pkg, err)
	}
	return path
}

func buildBinary(pkg string) (string, error) {
	mod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("find the module: %w", err)
	}
	root := filepath.Dir(strings.TrimSpace(string(mod)))
	dir := filepath.Join(rootDir, fmt.Sprintf("opfield-bin-%x", sha256.Sum256([]byte(root)))[:24])
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	path := filepath.Join(dir, filepath.Base(pkg))
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-trimpath", "-o", path, pkg)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
}
