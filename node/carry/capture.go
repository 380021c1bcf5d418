package carry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"

	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/node/docker"
	"github.com/opfield/availability/placement"
)

var errNoContainer = errors.New("there is no such container")

// labelPrefix begins every label of ours.
const labelPrefix = "opfield."

// Capture implements kind. It changes nothing.
func (k *containers) Capture(ctx context.Context, name string) (placement.Captured, error) {
	if name == "" || strings.ContainsAny(name, "/?#%\x00") {
		return placement.Captured{}, fmt.Errorf("%w: %q on node %s", errNoContainer, clip(name), k.node)
	}
	found, err := k.inspect(ctx, name)
	if cerrdefs.IsNotFound(err) {
		return placement.Captured{}, fmt.Errorf("%w: %q on node %s; `docker ps -a` there shows them", errNoContainer, clip(name), k.node)
	}
	if err != nil {
		return placement.Captured{}, err
	}
	if found.ContainerJSONBase == nil || found.Config == nil || found.HostConfig == nil || found.State == nil {
		return placement.Captured{}, fmt.Errorf("%w: %q on node %s: incomplete answer", errNoContainer, clip(name), k.node)
	}
	of, err := k.images.inspect(ctx, found.Image)
	if err != nil && !cerrdefs.IsNotFound(err) {
		return placement.Captured{}, err
	}
	c := placement.Captured{
		Node: k.node, Kind: placement.KindContainer, ID: found.ID, Name: strings.TrimPrefix(found.Name, "/"),
		Running: found.State.Running && !found.State.Paused, ImageRef: found.Config.Image, ImageID: found.Image, Arch: of.Architecture, OS: of.Os,
		Compose: found.Config.Labels[discovery.LabelComposeProject], RestartPolicy: restartPolicy(found.HostConfig.RestartPolicy),
		Platforms: k.images.offered(ctx, of), Mounts: mounts(found, of), Published: published(found), Exposed: exposed(found), Unsupported: unsupported(found),
	}
	if labels, err := discovery.ParseLabels(found.Config.Labels); err == nil {
		c.Workload, c.Ports = labels.Workload, labels.Ports
	}
	if c.Owned = k.owner(found.ID); c.Owned == "" {
		if id := found.Config.Labels[discovery.LabelPlacement]; id != "" && found.Config.Labels[discovery.LabelGeneration] != "" && !k.given(found.ID) {
			c.Owned = id
		}
	} else {
		c.Owned = placement.ID{Workload: c.Owned, Node: k.node}.String()
	}
	if c.Owned != "" {
		c.Unsupported = append(c.Unsupported, "it is placement "+c.Owned+" already")
	}
	u := measure(ctx, k.engine, found)
	c.CPU, c.Memory = u.cpu, u.memory
	c.Ready, c.Reason = k.ready(ctx, c, found)
	c.Spec, err = spec(found, of)
	return c, err
}

// restartPolicy is Docker's own notation, such as "on-failure:3".
func restartPolicy(p container.RestartPolicy) string {
	if p.MaximumRetryCount > 0 {
		return fmt.Sprintf("%s:%d", p.Name, p.MaximumRetryCount)
	}
	return string(p.Name)
}

// mounts lists everything but tmpfs, configured or observed (ELG-2).
func mounts(found container.InspectResponse, of image.InspectResponse) []placement.Mount {
	byDestination := map[string]placement.Mount{}
	add := func(m placement.Mount) {
		if _, known := byDestination[m.Destination]; !known {
			byDestination[m.Destination] = m
		}
	}
	for _, bind := range found.HostConfig.Binds {
		part := strings.Split(bind, ":")
		m := placement.Mount{Type: "anonymous volume", Destination: part[0], From: "configuration"}
		if len(part) > 1 {
			m.Source, m.Destination, m.Type = part[0], part[1], "volume"
			if strings.HasPrefix(part[0], "/") {
				m.Type = "bind"
			}
			m.ReadOnly = len(part) > 2 && slices.Contains(strings.Split(part[2], ","), "ro")
		}
		add(m)
	}
	for _, configured := range found.HostConfig.Mounts {
		if configured.Type == mount.TypeTmpfs {
			continue
		}
		m := placement.Mount{Type: string(configured.Type), Source: configured.Source, Destination: configured.Target, ReadOnly: configured.ReadOnly, From: "configuration"}
		if configured.Type == mount.TypeVolume && configured.Source == "" {
			m.Type = "anonymous volume"
		}
		add(m)
	}
	tmpfs := func(path string) bool {
		_, ok := found.HostConfig.Tmpfs[path]
		return ok || slices.ContainsFunc(found.HostConfig.Mounts, func(m mount.Mount) bool { return m.Type == mount.TypeTmpfs && m.Target == path })
	}
	if of.Config != nil {
		for path := range of.Config.Volumes {
			if !tmpfs(path) {
				add(placement.Mount{Type: "anonymous volume", Destination: path, From: "image"})
			}
		}
	}
	for path := range found.Config.Volumes {
		if !tmpfs(path) {
			add(placement.Mount{Type: "anonymous volume", Destination: path, From: "configuration"})
		}
	}
	for _, seen := range found.Mounts {
		if seen.Type == mount.TypeTmpfs {
			continue
		}
		m := placement.Mount{Type: string(seen.Type), Source: seen.Source, Destination: seen.Destination, ReadOnly: !seen.RW, From: "running container"}
		if seen.Type == mount.TypeVolume {
			m.Source = seen.Name
		}
		if known, ok := byDestination[seen.Destination]; ok && known.Source == "" {
			known.Source = m.Source
			byDestination[seen.Destination] = known
		}
		add(m)
	}
	var out []placement.Mount
	for _, path := range slices.Sorted(maps.Keys(byDestination)) {
		out = append(out, byDestination[path])
	}
	return out
}

func published(found container.InspectResponse) []placement.PublishedPort {
	var out []placement.PublishedPort
	for port, bindings := range found.HostConfig.PortBindings {
		for _, b := range bindings {
			n, err := strconv.ParseUint(b.HostPort, 10, 16)
			if err != nil {
				continue // a free one is taken at every start
			}
			out = append(out, placement.PublishedPort{Address: address(b.HostIP), Port: uint16(n), Container: uint16(port.Int()), Transport: port.Proto()})
		}
	}
	slices.SortFunc(out, func(a, b placement.PublishedPort) int { return int(a.Port) - int(b.Port) })
	return out
}

func exposed(found container.InspectResponse) []uint16 {
	var out []uint16
	for port := range found.Config.ExposedPorts {
		if port.Proto() == "tcp" {
			out = append(out, uint16(port.Int()))
		}
	}
	slices.Sort(out)
	return out
}

// unsupported lists the settings that mean something on this node only.
func unsupported(found container.InspectResponse) []string {
	var out []string
	h := found.HostConfig
	no := func(when bool, format string, args ...any) {
		if when {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	no(h.NetworkMode.IsHost(), "network mode host: its ports are the node's own")
	no(h.NetworkMode.IsContainer(), "network mode %s: it shares the network of another container", h.NetworkMode)
	no(h.NetworkMode.IsNone(), "network mode none: no port of it can be reached")
	no(len(h.Links) > 0, "links to other containers: %s", strings.Join(h.Links, ", "))
	no(len(h.VolumesFrom) > 0, "volumes of other containers: %s", strings.Join(h.VolumesFrom, ", "))
	no(h.PidMode.IsContainer(), "process namespace of another container")
	no(h.IpcMode.IsContainer(), "IPC namespace of another container")
	no(len(h.Devices) > 0 || len(h.DeviceRequests) > 0, "devices of the node")
	no(h.AutoRemove, "it is removed when it stops (--rm)")
	//lint:ignore SA1019 only here an engine says that the address was chosen; the endpoint's is always set
	mac := found.Config.MacAddress
	no(mac != "", "fixed MAC address %s", mac)
	if found.NetworkSettings != nil {
		for _, name := range slices.Sorted(maps.Keys(found.NetworkSettings.Networks)) {
			n := found.NetworkSettings.Networks[name]
			if n == nil {
				continue
			}
			no(n.IPAMConfig != nil && (n.IPAMConfig.IPv4Address != "" || n.IPAMConfig.IPv6Address != ""), "fixed address in network %s", name)
			no(len(n.Links) > 0 && len(h.Links) == 0, "links in network %s", name)
		}
	}
	return out
}

// ready looks once: the health check if there is one, else its ports.
func (k *containers) ready(ctx context.Context, c placement.Captured, found container.InspectResponse) (bool, string) {
	if !c.Running {
		return false, "it does not run"
	}
	if h := found.Config.Healthcheck; h != nil && len(h.Test) > 0 && h.Test[0] != "NONE" {
		if found.State.Health != nil && found.State.Health.Status == container.Healthy {
			return true, ""
		}
		return false, "its health check is not good"
	}
	addr := docker.Address(ctx, k.engine, found)
	if !addr.IsValid() {
		return false, "it has no network address"
	}
	var ports []uint16
	for _, p := range c.Ports {
		ports = append(ports, p.Port)
	}
	all := len(ports) > 0
	if !all {
		ports = c.Exposed
	}
	open := 0
	for _, port := range ports {
		d := net.Dialer{Timeout: time.Second}
		conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(addr, port).String())
		if err == nil {
			conn.Close()
			open++
		} else if all {
			return false, fmt.Sprintf("port %d does not accept connections", port)
		}
	}
	if open == 0 {
		return false, "no port that it names accepts connections"
	}
	return true, ""
}

// spec is how the container is created again elsewhere. What its image says is
// left out, so that a new image brings its own.
func spec(found container.InspectResponse, of image.InspectResponse) (json.RawMessage, error) {
	config, host := *found.Config, *found.HostConfig
	var base container.Config
	if of.Config != nil { // Docker's own document of an image's configuration
		b, err := json.Marshal(of.Config)
		if err == nil {
			err = json.Unmarshal(b, &base)
		}
		if err != nil {
			return nil, fmt.Errorf("configuration of the image: %w", err)
		}
	}
	s := placement.ContainerSpec{Env: []string{}, Networks: []placement.ContainerNetwork{}}
	for _, e := range config.Env {
		if !slices.Contains(base.Env, e) {
			s.Env = append(s.Env, e)
		}
	}
	config.Env, config.Image = nil, ""
	config.Labels = maps.Clone(config.Labels)
	maps.DeleteFunc(config.Labels, func(key, value string) bool {
		own, ok := base.Labels[key]
		return strings.HasPrefix(key, labelPrefix) || ok && own == value
	})
	if config.Hostname == short(found.ID) {
		config.Hostname = ""
	}
	if slices.Equal(config.Entrypoint, base.Entrypoint) {
		config.Entrypoint = nil
		if slices.Equal(config.Cmd, base.Cmd) {
			config.Cmd = nil // with an entrypoint of its own, Docker would not take the image's
		}
	}
	if config.WorkingDir == base.WorkingDir {
		config.WorkingDir = ""
	}
	if config.User == base.User {
		config.User = ""
	}
	if config.StopSignal == base.StopSignal {
		config.StopSignal = ""
	}
	if reflect.DeepEqual(config.Healthcheck, base.Healthcheck) {
		config.Healthcheck = nil
	}
	if slices.Equal(config.Shell, base.Shell) {
		config.Shell = nil
	}
	if slices.Equal(config.OnBuild, base.OnBuild) {
		config.OnBuild = nil
	}
	config.ExposedPorts = maps.Clone(config.ExposedPorts)
	for port := range base.ExposedPorts {
		delete(config.ExposedPorts, port)
	}
	config.Volumes = maps.Clone(config.Volumes)
	for path := range base.Volumes {
		delete(config.Volumes, path)
	}
	host.RestartPolicy, host.AutoRemove, host.ContainerIDFile = container.RestartPolicy{}, false, ""
	if found.NetworkSettings != nil {
		for _, name := range slices.Sorted(maps.Keys(found.NetworkSettings.Networks)) {
			n := found.NetworkSettings.Networks[name]
			if n == nil || name == network.NetworkBridge || name == network.NetworkHost || name == network.NetworkNone {
				continue
			}
			if n.NetworkID != "" && string(host.NetworkMode) == n.NetworkID {
				host.NetworkMode = container.NetworkMode(name)
			}
			own := placement.ContainerNetwork{Name: name}
			for _, alias := range n.Aliases {
				if alias != short(found.ID) && alias != strings.TrimPrefix(found.Name, "/") {
					own.Aliases = append(own.Aliases, alias)
				}
			}
			slices.Sort(own.Aliases)
			s.Networks = append(s.Networks, own)
		}
	}
	var err error
	if s.Config, err = json.Marshal(config); err == nil {
		s.Host, err = json.Marshal(host)
	}
	if err != nil {
		return nil, fmt.Errorf("configuration of %s: %w", found.Name, err)
	}
	return json.Marshal(s)
}
