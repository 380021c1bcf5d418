package registry

import (
	"archive/tar"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/image"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/system"
	"github.com/opfield/availability/placement"
)

const (
	bulk    = 200 << 20
	port    = "127.0.0.1:7448" // of the tests' doors; the agents have 7447
	soon    = 30 * time.Second
	forBulk = 3 * time.Minute
)

// scene is a running product with a door on each node.
type scene struct {
	t     *testing.T
	sys   *system.System
	doors []*lab.Process
}

func newScene(t *testing.T, config system.Config) *scene {
	env := lab.New(t)
	s := &scene{t: t, sys: system.Start(t, env, config)}
	for i, n := range s.sys.Nodes {
		env.Await(soon, n.ID+"'s agent reaches the registry", func() bool { return n.Agent.Logged("internal registry reached") })
		s.doors = append(s.doors, s.door(n, s.id(i)))
	}
	return s
}

// id is that of the door on a node: an identity of its own.
func (s *scene) id(i int) string { return fmt.Sprintf("door-%d", i+1) }

func (s *scene) door(n *system.Node, id string) *lab.Process {
	token := ""
	for line := range strings.Lines(s.sys.MustCLI("token", "create", "--role", "node", "--id", id)) {
		if line = strings.TrimSpace(line); !strings.Contains(line, " ") {
			token = line
		}
	}
	dir := n.Path("door")
	_, err := n.Run(s.sys.Env.Binary("./cmd/opfield-node"), "join", "--controller", s.sys.Controller.HostPort(8480),
		"--token", "@"+n.WriteFile("door-token", token), "--id", id, "--identity-dir", dir)
	require.NoError(s.t, err)
	args := []string{s.self(), "door", dir, port}
	for _, r := range s.sys.Relays {
		args = append(args, r.ID+"="+r.HostPort(9443))
	}
	// As the agent sets it for itself.
	p := n.StartEnv("door", []string{"GOGC=400", "GOMAXPROCS=1"}, args...)
	s.sys.Env.Await(soon, id+" reaches the registry", func() bool { return p.Logged("internal registry reached") })
	return p
}

func (s *scene) self() string {
	self, err := os.Executable()
	require.NoError(s.t, err)
	return self
}

// auth returns the credentials of the door on a node.
func (s *scene) auth(i int) string {
	auth := ""
	for line := range strings.Lines(s.doors[i].Log()) {
		var entry struct{ Auth string }
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Auth != "" {
			auth = entry.Auth
		}
	}
	require.NotEmpty(s.t, auth)
	return auth
}

// desire gives the door on a node its rights the way the product does: by
// what is desired of it.
func (s *scene) desire(i int, pull, push string) {
	want := map[string]placement.Desired{}
	add := func(workload string, img placement.Image, m *placement.Mirror) {
		if workload != "" {
			want[workload] = placement.Desired{
				Workload: workload, Node: s.id(i), Kind: placement.KindContainer, Revision: uint64(time.Now().UnixNano()), Generation: 1,
				Want: placement.WantPrepared, Container: workload, Image: img, Mirror: m,
			}
		}
	}
	add(pull, placement.Image{Repository: pull, Digest: "sha256:" + strings.Repeat("0", 64)}, nil)
	add(push, placement.Image{}, &placement.Mirror{Repository: push, Source: push})
	data, err := json.Marshal(want)
	require.NoError(s.t, err)
	c := s.sys.Controller
	_, err = c.Run(s.self(), "desire", c.Path("state", "store"), "tls://"+c.HostPort(4222), s.id(i), string(data))
	require.NoError(s.t, err)
}

// random makes an image of incompressible data.
func (s *scene) random(i int, ref string, size int64) {
	r, w := io.Pipe()
	go func() {
		pack := tar.NewWriter(w)
		err := pack.WriteHeader(&tar.Header{Name: "data", Mode: 0o644, Size: size})
		if err == nil {
			_, err = io.CopyN(pack, rand.Reader, size)
		}
		w.CloseWithError(errors.Join(err, pack.Close()))
	}()
	out, err := s.sys.Nodes[i].Docker().ImageImport(s.t.Context(), image.ImportSource{Source: r, SourceName: "-"}, ref, image.ImportOptions{})
	require.NoError(s.t, err)
	_, err = io.Copy(io.Discard, out)
	require.NoError(s.t, err)
}

// progress is a line of a push or a pull.
type progress struct {
	Status         string
	ProgressDetail struct{ Current, Total int64 }
	Error          string
}

func follow(out io.ReadCloser, err error, seen func(progress)) error {
	if err != nil {
		return err
	}
	defer out.Close()
	for dec := json.NewDecoder(out); ; {
		var p progress
		switch err := dec.Decode(&p); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case p.Error != "":
			return errors.New(p.Error)
		}
		seen(p)
	}
}

// push pushes and returns the digest.
func (s *scene) push(i int, repository string) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), forBulk)
	defer cancel()
	name, docker := port+"/"+repository, s.sys.Nodes[i].Docker()
	out, err := docker.ImagePush(ctx, name+":g1", image.PushOptions{RegistryAuth: s.auth(i)})
	if err = follow(out, err, quietly); err != nil {
		return "", err
	}
	found, err := docker.ImageInspect(ctx, name+":g1")
	if err != nil {
		return "", err
	}
	for _, pushed := range found.RepoDigests {
		if digest, ok := strings.CutPrefix(pushed, name+"@"); ok {
			return digest, nil
		}
	}
	return "", fmt.Errorf("%s was pushed under no digest: %q", name, found.RepoDigests)
}

func (s *scene) pull(i int, repository, digest string, seen func(progress)) error {
	ctx, cancel := context.WithTimeout(s.t.Context(), forBulk)
	defer cancel()
	out, err := s.sys.Nodes[i].Docker().ImagePull(ctx, port+"/"+repository+"@"+digest, image.PullOptions{RegistryAuth: s.auth(i)})
	return follow(out, err, seen)
}

// forget removes a pulled image, so that the next pull loads everything.
func (s *scene) forget(i int, repository, digest string) {
	_, err := s.sys.Nodes[i].Docker().ImageRemove(s.t.Context(), port+"/"+repository+"@"+digest, image.RemoveOptions{Force: true, PruneChildren: true})
	require.NoError(s.t, err)
}

func quietly(progress) {}

// refused checks that it was the door that forbade something: Docker repeats
// its word, with the containerd store its status or its explanation.
func refused(t *testing.T, err error) {
	t.Helper()
	require.Error(t, err)
	require.Regexp(t, "denied|403 Forbidden|may not do that", err.Error())
}

// peak returns the largest resident memory of a process in bytes.
func peak(t *testing.T, p *lab.Process) int64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid()))
	require.NoError(t, err)
	var kb int64
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			_, err := fmt.Sscan(rest, &kb)
			require.NoError(t, err)
		}
	}
	return kb << 10
}

func mib(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// IMG-1: an image goes from the engine of one node over the controller to that
// of another, with bounded memory on the way; nobody else gets in.
func TestRegistry_PushAndPull(t *testing.T) {
	start := time.Now()
	s := newScene(t, system.Config{Relays: 2, Nodes: 2})
	s.desire(0, "", "web")
	s.desire(1, "web", "")
	s.random(0, port+"/web:g1", bulk)
	t.Logf("ready after %v", time.Since(start).Round(time.Millisecond))

	start = time.Now()
	digest, err := s.push(0, "web")
	require.NoError(t, err)
	t.Logf("push of %s (compressed by Docker): %v", mib(bulk), time.Since(start).Round(time.Millisecond))
	var last time.Time
	start = time.Now()
	require.NoError(t, s.pull(1, "web", digest, func(p progress) {
		if p.Status == "Download complete" {
			last = time.Now()
		}
	}))
	loaded := last.Sub(start)
	t.Logf("pull of %s by digest: downloaded after %v (%.0f MB/s), ready after %v",
		mib(bulk), loaded.Round(time.Millisecond), bulk/loaded.Seconds()/1e6, time.Since(start).Round(time.Millisecond))
	for name, p := range map[string]*lab.Process{
		"controller": s.sys.Controller.Process, "pushing door": s.doors[0], "pulling door": s.doors[1], "relay-1": s.sys.Relays[0].Process,
	} {
		n := peak(t, p)
		t.Logf("peak memory of %s: %s", name, mib(n))
		require.Less(t, n, int64(160<<20), name)
	}

	// Foreign repositories.
	mark := time.Now()
	lap := func(what string) {
		t.Logf("%s: refused after %v", what, time.Since(mark).Round(time.Millisecond))
		mark = time.Now()
	}
	refused(t, s.pull(1, "shop", digest, quietly))
	lap("pull of a foreign repository")
	refused(t, s.pull(0, "shop", digest, quietly))
	lap("pull of a foreign repository by the node that pushes")
	require.NoError(t, s.sys.Nodes[1].Docker().ImageTag(t.Context(), lab.AppImage, port+"/web:g1"))
	_, err = s.push(1, "web")
	refused(t, err)
	lap("push by a node that may pull only")
	s.desire(0, "web", "")
	require.NoError(t, s.sys.Nodes[0].Docker().ImageTag(t.Context(), lab.AppImage, port+"/web:g1"))
	require.Eventually(t, func() bool { _, err = s.push(0, "web"); return err != nil }, soon, time.Second)
	refused(t, err)
	lap("push of what is not to be mirrored any more")

	// Another local user, at the port of the real agent.
	body, err := system.Get(s.sys.Nodes[0].Host, "http://127.0.0.1:7447/v2/")
	require.ErrorContains(t, err, "401", "%s", body)
}

// IMG-3: a pull survives the restart of every relay in its middle, and the
// controller's restart costs a moment.
func TestRegistry_Restarts(t *testing.T) {
	s := newScene(t, system.Config{Relays: 1, Nodes: 2})
	s.desire(0, "", "web")
	s.desire(1, "web", "")
	s.random(0, port+"/web:g1", bulk)
	digest, err := s.push(0, "web")
	require.NoError(t, err)

	relay := s.sys.Relays[0].Process
	var once sync.Once
	cut := make(chan int64, 1)
	try, start := 0, time.Now()
	for ; ; try++ {
		err = s.pull(1, "web", digest, func(p progress) {
			if p.Status == "Downloading" && p.ProgressDetail.Current > bulk/20 {
				once.Do(func() {
					relay.Kill()
					relay.Start()
					cut <- p.ProgressDetail.Current
				})
			}
		})
		if err == nil || try == 10 {
			break
		}
		t.Logf("pull %d: %v", try, err)
		time.Sleep(time.Second)
	}
	require.NoError(t, err)
	select {
	case at := <-cut:
		t.Logf("relay killed and started after %s: the pull took %v and %d more tries of the caller", mib(at), time.Since(start).Round(time.Millisecond), try)
	default:
		t.Fatal("the pull was over before the relay was restarted")
	}

	s.forget(1, "web", digest)
	start = time.Now()
	s.sys.Controller.Process.Restart(10 * time.Second)
	// The policy engine knows no policy of these doors and ends what is desired
	// of them when it begins; it is asked for again.
	s.sys.Env.Await(soon, "the controller decides about policies again", func() bool {
		return strings.Count(s.sys.Controller.Process.Log(), "this controller decides about policies") == 2
	})
	s.desire(1, "web", "")
	s.sys.Env.Await(soon, "the image is pulled after the controller's restart", func() bool {
		err := s.pull(1, "web", digest, quietly)
		if err != nil {
			t.Logf("after %v: %v", time.Since(start).Round(time.Millisecond), err)
		}
		return err == nil
	})
	t.Logf("pulled %v after the controller was told to restart", time.Since(start).Round(time.Millisecond))
}
