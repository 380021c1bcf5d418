package lab

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/opfield/availability/e2e/delivery"
)

// App describes a container with the test application, which listens on
// 8080 (HTTP/1.1 and cleartext HTTP/2) and 9000 (TCP echo).
type App struct {
	Name     string // of the container; the workload's name if empty
	Workload string // label opfield.workload; no labels at all if empty
	Ports    string // label opfield.port; 8080 if empty
	Role     string // label opfield.role
	Protocol string // label opfield.protocol
	Health   bool   // use the image with a health check

	Args   []string          // further arguments of the application
	Labels map[string]string // further labels; they override
	Env    []string
	// StopSignal and StopSeconds are the container's own; zero is Docker's
	// default.
	StopSignal  string
	StopSeconds int
	// Configure edits what is created, as the last step.
	Configure func(*container.Config, *container.HostConfig)
}

// Container is a container on a node.
type Container struct {
	node *Node
	name string
	id   string
}

// RunApp creates and starts a container with the test application.
func (n *Node) RunApp(a App) *Container {
	n.env.tb.Helper()
	if a.Name == "" {
		a.Name = a.Workload
	}
	labels := map[string]string{}
	if a.Workload != "" {
		labels["opfield.workload"] = a.Workload
		labels["opfield.port"] = "8080"
	}
	for key, value := range map[string]string{"opfield.port": a.Ports, "opfield.role": a.Role, "opfield.protocol": a.Protocol} {
		if value != "" {
			labels[key] = value
		}
	}
	for key, value := range a.Labels {
		labels[key] = value
	}
	dir := filepath.Join(n.deliveriesDir(), a.Name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		n.env.tb.Fatalf("run %s on %s: %v", a.Name, n.name, err)
	}
	config := &container.Config{
		Image: AppImage, Labels: labels, StopSignal: a.StopSignal, Env: a.Env, Hostname: n.name,
		Cmd: append([]string{"serve", "--name", n.name + "/" + a.Name, "--record", "/record/deliveries"}, a.Args...),
	}
	if a.Health {
		config.Image = HealthImage
	}
	if a.StopSeconds > 0 {
		config.StopTimeout = &a.StopSeconds
	}
	host := &container.HostConfig{Binds: []string{dir + ":/record"}}
	if a.Configure != nil {
		a.Configure(config, host)
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	created, err := n.docker.ContainerCreate(ctx, config, host, nil, nil, a.Name)
	if err == nil {
		err = n.docker.ContainerStart(ctx, created.ID, container.StartOptions{})
	}
	if err != nil {
		n.env.tb.Fatalf("run %s on %s: %v", a.Name, n.name, err)
	}
	return &Container{node: n, name: a.Name, id: created.ID}
}

// ID returns the full id of the container.
func (c *Container) ID() string { return c.id }

// Node returns the node the container is on.
func (c *Container) Node() *Node { return c.node }

// Kill sends a signal ("KILL", "TERM") as docker kill does.
func (c *Container) Kill(signal string) {
	c.node.env.tb.Helper()
	c.must("kill", func(ctx context.Context) error { return c.node.docker.ContainerKill(ctx, c.id, signal) })
}

// Stop stops the container as docker stop does, and returns after it ended.
func (c *Container) Stop(seconds int) {
	c.node.env.tb.Helper()
	c.must("stop", func(ctx context.Context) error {
		return c.node.docker.ContainerStop(ctx, c.id, container.StopOptions{Timeout: &seconds})
	})
}

// Start starts a stopped container again.
func (c *Container) Start() {
	c.node.env.tb.Helper()
	c.must("start", func(ctx context.Context) error {
		return c.node.docker.ContainerStart(ctx, c.id, container.StartOptions{})
	})
}

// Restart restarts the container as docker restart does.
func (c *Container) Restart(seconds int) {
	c.node.env.tb.Helper()
	c.must("restart", func(ctx context.Context) error {
		return c.node.docker.ContainerRestart(ctx, c.id, container.StopOptions{Timeout: &seconds})
	})
}

// Pause freezes the container.
func (c *Container) Pause() {
	c.node.env.tb.Helper()
	c.must("pause", func(ctx context.Context) error { return c.node.docker.ContainerPause(ctx, c.id) })
}

// Unpause undoes Pause.
func (c *Container) Unpause() {
	c.node.env.tb.Helper()
	c.must("unpause", func(ctx context.Context) error { return c.node.docker.ContainerUnpause(ctx, c.id) })
}

// Remove kills and removes the container.
func (c *Container) Remove() {
	c.node.env.tb.Helper()
	c.must("remove", func(ctx context.Context) error {
		return c.node.docker.ContainerRemove(ctx, c.id, container.RemoveOptions{Force: true})
	})
}

// Inspect returns what the engine knows of the container.
func (c *Container) Inspect() container.InspectResponse {
	c.node.env.tb.Helper()
	var found container.InspectResponse
	c.must("inspect", func(ctx context.Context) (err error) {
		found, err = c.node.docker.ContainerInspect(ctx, c.id)
		return err
	})
	return found
}

// Addr returns the container's address and port, reachable on its host.
func (c *Container) Addr(port uint16) netip.AddrPort {
	c.node.env.tb.Helper()
	text := ""
	for _, n := range c.Inspect().NetworkSettings.Networks {
		text = n.IPAddress
	}
	addr, err := netip.ParseAddr(text)
	if err != nil {
		c.node.env.tb.Fatalf("address of %s on %s: %v", c.name, c.node.name, err)
	}
	return netip.AddrPortFrom(addr, port)
}

// SetHealthy switches what the application's health check answers, without
// any traffic to it.
func (c *Container) SetHealthy(healthy bool) {
	c.node.env.tb.Helper()
	flag := filepath.Join(c.node.deliveriesDir(), c.name, "unhealthy")
	err := os.WriteFile(flag, nil, 0o644)
	if healthy {
		err = os.Remove(flag)
	}
	if err != nil && !os.IsNotExist(err) {
		c.node.env.tb.Fatalf("switch health of %s: %v", c.name, err)
	}
}

// Deliveries returns what the application received so far. It reads the
// node's disk, so a network that is cut and a container that is dead do not
// matter.
func (c *Container) Deliveries() []delivery.Record {
	c.node.env.tb.Helper()
	records, err := delivery.ReadFile(filepath.Join(c.node.deliveriesDir(), c.name, "deliveries"))
	if err != nil && !os.IsNotExist(err) {
		c.node.env.tb.Fatalf("read deliveries of %s: %v", c.name, err)
	}
	return records
}

func (c *Container) must(verb string, call func(context.Context) error) {
	c.node.env.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	start := time.Now()
	if err := call(ctx); err != nil {
		c.node.env.tb.Fatalf("%s %s on %s: %v (after %v)", verb, c.name, c.node.name, err, time.Since(start))
	}
}

// Deliveries returns what every container of every node received so far,
// each record with the "node/container" that received it.
func (e *Env) Deliveries() []delivery.Record {
	e.tb.Helper()
	files, err := filepath.Glob(filepath.Join(e.dir, "*", "deliveries", "*", "deliveries"))
	if err != nil {
		e.tb.Fatalf("find deliveries: %v", err)
	}
	var all []delivery.Record
	for _, file := range files {
		records, err := delivery.ReadFile(file)
		if err != nil {
			e.tb.Fatalf("read deliveries: %v", err)
		}
		part := strings.Split(file, string(filepath.Separator))
		for i := range records {
			records[i].By = fmt.Sprintf("%s/%s", part[len(part)-4], part[len(part)-2])
		}
		all = append(all, records...)
	}
	return all
}
