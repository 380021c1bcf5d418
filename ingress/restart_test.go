package ingress_test

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/upstream"
)

// RTE-8: whether the sidecar is replaced, stopped or killed, known members
// that opened or closed meanwhile wait for 30 s of quiet as always.
func TestIngress_RestartDoesNotReloadForKnownMembers(t *testing.T) {
	for _, test := range []struct {
		name    string
		crashed bool
	}{{"handover", false}, {"crash", true}} {
		t.Run(test.name, func(t *testing.T) {
			e := newEnv(t)
			e.place("web", true, "a", "b")
			e.place("web", false, "c")
			e.source.SetRoutes(t, route("web", "web.example", "web"))
			e.start()
			e.settled()
			generation, reloads := e.ingress.Status().Reload.Generation, e.reloads()
			file := filepath.Join(e.dir, "state", "ingress-state.json")
			var kept []byte
			e.within(time.Second, "the generation is remembered at once", func() bool {
				kept, _ = os.ReadFile(file)
				return strings.Contains(string(kept), generation)
			})
			e.stop()
			if test.crashed {
				require.NoError(t, os.WriteFile(file, kept, 0o600))
			}
			e.source.Publish(event("web", "a", 2, false))
			e.source.Publish(event("web", "c", 2, true))
			e.start()
			e.unchanged(generation, reloads)
			require.Equal(t, upstream.Joined, e.endpoints.State(link("web", "a")))
			require.Equal(t, upstream.Open, e.endpoints.State(link("web", "c")))
			require.Equal(t, 200, e.do(http.MethodGet, e.url("web.example", "/"), "").StatusCode)

			// And the change is still to come; a route takes it along.
			e.source.SetRoutes(t, route("web", "web.example", "web"), route("new", "new.example", "web"))
			e.within(2*raceFactor*time.Second, "a route applies promptly", func() bool { return e.reloads() == reloads+1 })
			e.settled()
			require.Equal(t, reloads+1, e.reloads())
		})
	}
}

// unchanged waits until the sidecar has looked at nginx and left it alone,
// with a change that waits.
func (e *env) unchanged(generation string, reloads int) {
	e.t.Helper()
	e.within(10*time.Second, "looked at", func() bool { return e.ingress.Status().Reload.Result != "" })
	require.Never(e.t, func() bool { return e.reloads() != reloads }, 3*time.Second, 50*time.Millisecond, "nginx was reloaded")
	s := e.ingress.Status().Reload
	require.Equal(e.t, "unchanged", s.Result)
	require.Equal(e.t, generation, s.Generation)
	require.True(e.t, s.Pending)
}

// RTE-8: a route that changed while the sidecar was away is applied promptly.
func TestIngress_RestartAppliesRoutesPromptly(t *testing.T) {
	e := newEnv(t)
	e.place("web", true, "a", "b")
	e.source.SetRoutes(t, route("web", "web.example", "web"))
	e.start()
	e.settled()
	reloads := e.reloads()
	e.stop()
	e.source.SetRoutes(t, route("web", "web.example", "web"), route("new", "new.example", "web"))
	e.source.Publish(event("web", "a", 2, false))
	e.start()
	e.within(3*raceFactor*time.Second, "served", func() bool {
		return e.do(http.MethodGet, e.url("new.example", "/"), "").StatusCode == 200
	})
	e.settled()
	require.Equal(t, reloads+1, e.reloads(), "one reload for both")
}
