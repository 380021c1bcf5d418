package lab

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"time"

	"github.com/docker/docker/api/types/build"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
)

const (
	engineStart = 20 * time.Second // first start of an engine on a busy machine
	callLimit   = 60 * time.Second // any call to an engine

	// StoreVariable names the environment variable that chooses the engines'
	// image store: "containerd", which Docker 29 has by default and Docker 24
	// and later on demand; empty: Docker's own.
	StoreVariable = "OPFIELD_E2E_STORE"

	// AppImage is the test application without a health check.
	AppImage = "opfield/testapp:plain"
	// HealthImage is the test application with an image health check every
	// second; two failures in a row make it unhealthy.
	HealthImage = "opfield/testapp:health"
)

// Node is a host with a Docker engine of its own.
type Node struct {
	*Host
	Engine *Process // dockerd
	docker *client.Client
}

// Node makes a host with a Docker engine that has the images of the test
// application, or returns the one made before under that name. Further
// arguments go to dockerd.
func (e *Env) Node(name string, engineArgs ...string) *Node {
	e.tb.Helper()
	e.mu.Lock()
	for _, n := range e.nodes {
		if n.name == name {
			e.mu.Unlock()
			return n
		}
	}
	e.mu.Unlock()
	h := e.Host(name)
	n := &Node{Host: h}
	// The storage driver is the kernel's best: overlay2, or vfs where the disk
	// of the test machine is an overlay itself. The engine leaves the packet
	// filter alone: published ports are served by its proxy.
	drivers := []string{"overlay2", "vfs"}
	switch store := os.Getenv(StoreVariable); store {
	case "":
	case "containerd":
		drivers = []string{"overlayfs", "native"}
		engineArgs = append([]string{"--feature", "containerd-snapshotter=true"}, engineArgs...)
	default:
		e.tb.Fatalf("%s is %q: leave it empty for Docker's own image store, or set it to \"containerd\"", StoreVariable, store)
	}
	for _, driver := range drivers {
		n.Engine = h.Start("dockerd-"+driver, append([]string{"dockerd",
			"--data-root", h.Path("docker", "data"), "--exec-root", h.Path("docker", "exec"),
			"--pidfile", h.Path("docker", "pid"), "-H", n.Socket(),
			"--bip", fmt.Sprintf("10.211.%d.1/24", h.index), "--mtu", "1500",
			"--default-address-pool", fmt.Sprintf("base=10.212.%d.0/24,size=28", h.index),
			"--storage-driver", driver, "--iptables=false", "--ip6tables=false", "--userland-proxy=true",
			"--max-concurrent-downloads", "2", "--log-level", "warn"}, engineArgs...)...)
		docker, err := client.NewClientWithOpts(client.WithHost(n.Socket()), client.WithAPIVersionNegotiation())
		if err != nil {
			e.tb.Fatalf("make client of the engine of %s: %v", name, err)
		}
		n.docker = docker
		if err = n.AwaitEngine(); err == nil {
			break
		}
		if driver == drivers[len(drivers)-1] {
			e.tb.Fatalf("start engine of %s: %v\n%s", name, err, n.Engine.Log())
		}
		n.Engine.Stop(5 * time.Second)
	}
	e.mu.Lock()
	e.nodes = append(e.nodes, n)
	e.mu.Unlock()
	if err := n.buildApp(); err != nil {
		e.tb.Fatalf("build test application on %s: %v", name, err)
	}
	return n
}

// Nodes makes several nodes at the same time.
func (e *Env) Nodes(names ...string) []*Node {
	e.tb.Helper()
	for _, name := range names {
		e.Host(name) // addresses follow the order of the names
	}
	nodes := make([]*Node, len(names))
	done := make(chan struct{})
	for i, name := range names {
		go func() {
			defer func() { done <- struct{}{} }() // also when Fatalf ends this goroutine
			nodes[i] = e.Node(name)
		}()
	}
	for range names {
		<-done
	}
	for i, n := range nodes {
		if n == nil {
			e.tb.Fatalf("node %s did not start", names[i])
		}
	}
	return nodes
}

// Socket returns the address of the engine, "unix:///…".
func (n *Node) Socket() string { return "unix://" + n.Path("docker.sock") }

// Docker returns a client of the node's engine.
func (n *Node) Docker() *client.Client { return n.docker }

// Containers returns every container of the engine, running or not.
func (n *Node) Containers() []container.Summary {
	n.env.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	all, err := n.docker.ContainerList(ctx, container.ListOptions{All: true})
	if err != nil {
		n.env.tb.Fatalf("list containers of %s: %v", n.name, err)
	}
	return all
}

// Inspect returns what the engine knows of a container.
func (n *Node) Inspect(id string) container.InspectResponse {
	n.env.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	found, err := n.docker.ContainerInspect(ctx, id)
	if err != nil {
		n.env.tb.Fatalf("inspect %s on %s: %v", id, n.name, err)
	}
	return found
}

// AwaitEngine waits until the engine answers.
func (n *Node) AwaitEngine() error {
	var err error
	for start := time.Now(); time.Since(start) < engineStart; time.Sleep(pollEvery) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err = n.docker.Ping(ctx)
		cancel()
		if err == nil || !n.Engine.Running() {
			break
		}
	}
	if !n.Engine.Running() {
		return errors.Join(errors.New("dockerd ended"), err)
	}
	return err
}

// KillEngine ends the engine with SIGKILL; the containers go on. Its containerd
// ends with it. Where nobody collects that process, its number would stay taken
// and the next engine would wait for it: so what it wrote down is removed.
func (n *Node) KillEngine() {
	n.env.tb.Helper()
	n.Engine.Kill()
	if err := os.Remove(n.Path("docker", "exec", "containerd", "containerd.pid")); err != nil && !os.IsNotExist(err) {
		n.env.tb.Fatalf("kill the engine of %s: %v", n.name, err)
	}
}

// buildApp builds the images of the test application from nothing but its
// binary.
func (n *Node) buildApp() error {
	binary, err := os.ReadFile(n.env.Binary("./e2e/testapp"))
	if err != nil {
		return err
	}
	const plain = "FROM scratch\nCOPY testapp /testapp\nENTRYPOINT [\"/testapp\"]\n"
	const health = "FROM " + AppImage + "\nHEALTHCHECK --interval=1s --timeout=1s --retries=2 CMD [\"/testapp\",\"check\"]\n"
	if err := n.build(AppImage, plain, map[string][]byte{"testapp": binary}); err != nil {
		return err
	}
	return n.build(HealthImage, health, nil)
}

// BuildBig builds the test application with its health check and with so many
// megabytes that no other node has, and returns the id of the image.
func (n *Node) BuildBig(tag string, megabytes int) string {
	n.env.tb.Helper()
	ballast := make([]byte, megabytes<<20)
	_, _ = rand.Read(ballast) // it never fails
	if err := n.build(tag, "FROM "+HealthImage+"\nCOPY ballast /ballast\n", map[string][]byte{"ballast": ballast}); err != nil {
		n.env.tb.Fatalf("build %s on %s: %v", tag, n.name, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	found, err := n.docker.ImageInspect(ctx, tag)
	if err != nil {
		n.env.tb.Fatalf("inspect %s on %s: %v", tag, n.name, err)
	}
	return found.ID
}

// build builds an image of some files.
func (n *Node) build(tag, dockerfile string, files map[string][]byte) error {
	var pack bytes.Buffer
	w := tar.NewWriter(&pack)
	files = maps.Clone(files)
	if files == nil {
		files = map[string][]byte{}
	}
	files["Dockerfile"] = []byte(dockerfile)
	for name, content := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content))}); err != nil {
			return err
		}
		if _, err := w.Write(content); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	resp, err := n.docker.ImageBuild(ctx, &pack, build.ImageBuildOptions{Tags: []string{tag}, Remove: true, ForceRemove: true})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for dec := json.NewDecoder(resp.Body); ; {
		var line struct{ Error string }
		switch err := dec.Decode(&line); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case line.Error != "":
			return fmt.Errorf("build %s: %s", tag, line.Error)
		}
	}
}

// removeContainers makes the engine's end quick and clean: no control group
// and no mount of a container stays behind.
func (n *Node) removeContainers() {
	n.Engine.Continue()
	if n.Engine.Running() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		list, _ := n.docker.ContainerList(ctx, container.ListOptions{All: true})
		for _, c := range list {
			// What fails here is killed and unmounted with the rest.
			_ = n.docker.ContainerRemove(ctx, c.ID, container.RemoveOptions{Force: true})
		}
	}
	n.Engine.Stop(5 * time.Second)
	_ = n.docker.Close()
}

// deliveriesDir is where the containers of a node record what they received.
func (n *Node) deliveriesDir() string { return filepath.Join(n.dir, "deliveries") }
