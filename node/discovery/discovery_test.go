package discovery_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/placement"
)

// web is a ready container of workload web without a health check.
func web(edits ...func(*discovery.Container)) discovery.Container {
	c := discovery.Container{
		ID: "1", Name: "web-1", Labels: map[string]string{"opfield.workload": "web", "opfield.port": "80"},
		Status: discovery.Running, Addr: netip.MustParseAddr("10.0.0.1"),
		Ports: map[uint16]discovery.PortState{80: discovery.PortOpen},
	}
	for _, edit := range edits {
		edit(&c)
	}
	return c
}

type edit = func(*discovery.Container)

func named(name, addr string) edit {
	return func(c *discovery.Container) { c.ID, c.Name, c.Addr = name, name, netip.MustParseAddr(addr) }
}
func label(key, value string) edit {
	return func(c *discovery.Container) { c.Labels[key] = value }
}
func status(s discovery.Status) edit { return func(c *discovery.Container) { c.Status = s } }
func health(h discovery.Health) edit {
	return func(c *discovery.Container) { c.Health, c.Ports = h, nil }
}
func port(s discovery.PortState) edit {
	return func(c *discovery.Container) { c.Ports = map[uint16]discovery.PortState{80: s} }
}
func stopping(c *discovery.Container) { c.Stopping = true }
func standby(c *discovery.Container)  { c.Labels["opfield.role"] = "standby" }

func TestFold(t *testing.T) { // DSC-1, RDY-1
	tests := []struct {
		name       string
		containers []discovery.Container
		want       string // role state ready targets, or "" for no placement
		reason     string
		warning    string
	}{
		{name: "ready by port", containers: []discovery.Container{web()}, want: "serving running true 10.0.0.1:80"},
		{name: "not labelled", containers: []discovery.Container{web(func(c *discovery.Container) { c.Labels = nil })}},
		{name: "port not open yet", containers: []discovery.Container{web(port(discovery.PortOpening))},
			want: "serving starting false ", reason: "port 80 does not accept connections yet"},
		{name: "port not probed yet", containers: []discovery.Container{web(port(discovery.PortUnknown))}, want: "serving starting false "},
		{name: "port closed again", containers: []discovery.Container{web(port(discovery.PortClosed))}, want: "serving unhealthy false "},
		{name: "healthy", containers: []discovery.Container{web(health(discovery.Healthy))}, want: "serving running true 10.0.0.1:80"},
		{name: "healthy but a dial failed", containers: []discovery.Container{web(health(discovery.Healthy), port(discovery.PortClosed))}, want: "serving unhealthy false "},
		{name: "check starting although the port is open", containers: []discovery.Container{web(health(discovery.Checking), port(discovery.PortOpen))}, want: "serving starting false "},
		{name: "unhealthy although the port is open", containers: []discovery.Container{web(health(discovery.Unhealthy), port(discovery.PortOpen))}, want: "serving unhealthy false "},
		{name: "paused", containers: []discovery.Container{web(status(discovery.Paused))}, want: "serving unhealthy false ", reason: "paused"},
		{name: "restarting", containers: []discovery.Container{web(status(discovery.Restarting))}, want: "serving starting false "},
		{name: "killed", containers: []discovery.Container{web(status(discovery.Stopped))}, want: "serving stopped false "},
		{name: "suspect", containers: []discovery.Container{web(func(c *discovery.Container) { c.Suspect = "out of memory" })}, want: "serving unhealthy false ", reason: "out of memory"},
		{name: "no address", containers: []discovery.Container{web(func(c *discovery.Container) { c.Addr = netip.Addr{} })}, want: "serving starting false "},
		{name: "stopping still answers", containers: []discovery.Container{web(stopping)}, want: "draining running true 10.0.0.1:80"},
		{name: "stopped", containers: []discovery.Container{web(stopping, status(discovery.Stopped))}, want: "stopped stopped false "},
		{name: "standby takes nothing", containers: []discovery.Container{web(standby)}, want: "standby running true "},
		{name: "standby draining takes nothing new", containers: []discovery.Container{web(standby, stopping)}, want: "draining running true 10.0.0.1:80"},
		{name: "standby beside a dead serving one", containers: []discovery.Container{
			web(status(discovery.Stopped)), web(named("web-2", "10.0.0.2"), standby)}, want: "serving stopped false "},
		{name: "one of two ready", containers: []discovery.Container{
			web(port(discovery.PortClosed)), web(named("web-2", "10.0.0.2"))}, want: "serving running true 10.0.0.2:80"},
		{name: "two ready", containers: []discovery.Container{web(), web(named("web-2", "10.0.0.2"))}, want: "serving running true 10.0.0.1:80 10.0.0.2:80"},
		{name: "one of two stops", containers: []discovery.Container{web(stopping), web(named("web-2", "10.0.0.2"))}, want: "serving running true 10.0.0.2:80"},
		{name: "one stops, the other is not ready", containers: []discovery.Container{
			web(stopping), web(named("web-2", "10.0.0.2"), port(discovery.PortOpening))}, want: "serving starting false "},
		{name: "one stops beside a leftover", containers: []discovery.Container{
			web(stopping), web(named("web-0", "10.0.0.2"), status(discovery.Stopped))}, want: "draining running true 10.0.0.1:80"},
		{name: "different ports", containers: []discovery.Container{
			web(), web(named("web-2", "10.0.0.2"), label("opfield.port", "81"), port(discovery.PortOpening))},
			want: "serving starting false 10.0.0.1:80"},
		{name: "protocols differ", containers: []discovery.Container{
			web(), web(named("web-2", "10.0.0.2"), label("opfield.protocol", "tcp"))},
			want: "serving running true 10.0.0.1:80 10.0.0.2:80", warning: "port 80 is http in container web-1 but tcp in web-2"},
		{name: "bad port", containers: []discovery.Container{web(label("opfield.port", "eighty"))}, warning: `label opfield.port: port "eighty"`},
		{name: "no port", containers: []discovery.Container{web(label("opfield.port", ""))}, warning: "label opfield.port"},
		{name: "bad name", containers: []discovery.Container{web(label("opfield.workload", "Web;"))}, warning: "label opfield.workload"},
		{name: "bad role", containers: []discovery.Container{web(label("opfield.role", "boss"))}, warning: "use serving or standby"},
		{name: "bad protocol", containers: []discovery.Container{web(label("opfield.protocol", "udp"))}, warning: "use http, grpc or tcp"},
		{name: "a bad one beside a good one", containers: []discovery.Container{web(), web(named("web-2", "10.0.0.2"), label("opfield.port", "-1"))},
			want: "serving running true 10.0.0.1:80", warning: "container web-2 is not announced"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			for range 8 {
				found, warnings := discovery.Fold("node-1", test.containers, nil)
				if test.want == "" {
					require.Empty(t, found)
				} else {
					require.Len(t, found, 1)
					e := found[0].Event
					require.NoError(t, e.Check())
					require.Equal(t, test.want, fmt.Sprintf("%s %s %t %s", e.Role, e.State, e.Ready, targets(found[0])))
					require.Contains(t, e.Reason, test.reason)
					require.Equal(t, !e.Ready, e.Reason != "")
				}
				if test.warning == "" {
					require.Empty(t, warnings)
				} else {
					require.Len(t, warnings, 1)
					require.Contains(t, warnings[0], test.warning)
				}
				rand.Shuffle(len(test.containers), func(i, j int) {
					test.containers[i], test.containers[j] = test.containers[j], test.containers[i]
				})
			}
		})
	}
}

func targets(p discovery.Placement) string {
	var all []string
	for _, port := range p.Event.Ports {
		for _, addr := range p.Targets[port.Port] {
			all = append(all, addr.String())
		}
	}
	return strings.Join(all, " ")
}

func TestParseLabels_Ports(t *testing.T) {
	tests := []struct{ ports, protocol, want string }{
		{"80", "", "80/http"},
		{" 9000 , 80", "", "80/http 9000/http"},
		{"80,9000=tcp", "", "80/http 9000/tcp"},
		{"80,9000", "tcp", "80/tcp 9000/tcp"},
		{"80,9000", "9000=grpc", "80/http 9000/grpc"},
		{"80,9000", "grpc,80=http", "80/http 9000/grpc"},
		{"80,80", "", "80/http"},
		{"80,80=tcp", "", "error label opfield.port: port 80 is named twice, as http and tcp"},
		{"0", "", `error label opfield.port: port "0"`},
		{"65536", "", `error label opfield.port: port "65536"`},
		{"80", "90=tcp", "error label opfield.protocol: port 90 is not in opfield.port"},
		{"80", "x=tcp", `error label opfield.protocol: port "x"`},
		{"80=", "", `error label opfield.port: protocol ""`},
		{strings.Repeat("9", 5000), "", "error label opfield.port: port"},
	}
	for _, test := range tests {
		s, err := discovery.ParseLabels(map[string]string{"opfield.workload": "w", "opfield.port": test.ports, "opfield.protocol": test.protocol})
		if want, isErr := strings.CutPrefix(test.want, "error "); isErr {
			require.ErrorContains(t, err, want)
			require.Less(t, len(err.Error()), 300)
			continue
		}
		require.NoError(t, err)
		var got []string
		for _, p := range s.Ports {
			got = append(got, fmt.Sprintf("%d/%s", p.Port, p.Protocol))
		}
		require.Equal(t, test.want, strings.Join(got, " "))
	}
}

func TestFold_ComposeService(t *testing.T) {
	found, _ := discovery.Fold("node-1", []discovery.Container{web(label("com.docker.compose.project", "shop"))}, nil)
	require.Equal(t, placement.KindCompose, found[0].Event.Kind)
}
