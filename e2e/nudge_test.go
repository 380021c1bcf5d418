package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	nudgePOSTs  = 2000
	nudgeSpread = 400 * time.Microsecond
	nudgeConns  = 16 // clients with a kept-alive connection each
	nudgeRounds = 1500
	// nudgedMost is when few kept-alive connections lead to a closed placement
	// any more, nudgedWithin when none does.
	nudgedMost   = 10 * time.Millisecond
	nudgedWithin = 600 * time.Millisecond
	longRun      = 20 // seconds that a download and a stream of events take
	busyClients  = 24 // that send one request after another
)

// received counts requests by id, over all placements.
type received struct {
	mu   sync.Mutex
	ids  map[string]int
	last map[string]int // by placement
}

func (r *received) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last["a"] + r.last["b"]
}

func (r *received) handler(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
		r.mu.Lock()
		r.ids[req.Header.Get("X-Request-Id")]++
		r.last[name]++
		r.mu.Unlock()
		w.Header().Set("X-Served-By", name)
		out := http.NewResponseController(w)
		switch req.URL.Path {
		case "/warm":
			<-time.After(3 * time.Millisecond) // so that the clients need connections of their own
			_, _ = fmt.Fprint(w, "ok")
		case "/download":
			w.Header().Set("Content-Length", fmt.Sprint(longRun*1000*10))
			for i := range longRun * 10 {
				_, _ = fmt.Fprintf(w, "%01000d", i)
				_ = out.Flush()
				<-time.After(100 * time.Millisecond)
			}
		case "/events":
			w.Header().Set("Content-Type", "text/event-stream")
			for i := range longRun * 10 {
				_, _ = fmt.Fprintf(w, "id: %d\ndata: x\n\n", i)
				_ = out.Flush()
				<-time.After(100 * time.Millisecond)
			}
		default:
			_, _ = fmt.Fprint(w, "ok")
		}
	})
}

// keptClient is a client with one connection, of which nothing is repeated.
type keptClient struct {
	addr   string
	conn   net.Conn
	reader *bufio.Reader
	used   int // requests on the connection; nginx ends it after some
}

// keptMost is below nginx's keepalive_requests.
const keptMost = 500

func (c *keptClient) dial(t *testing.T) {
	t.Helper()
	if c.conn != nil {
		_ = c.conn.Close()
	}
	conn, err := net.Dial("tcp", c.addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	c.conn, c.reader, c.used = conn, bufio.NewReader(conn), 0
}

func (c *keptClient) send(request []byte) error {
	c.used++
	_, err := c.conn.Write(request)
	return err
}

func postBytes(path, id string) []byte {
	return fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: %s\r\nX-Request-Id: %s\r\nContent-Length: 5\r\n\r\nhello", path, webHost, id)
}

func (c *keptClient) answer() (status int, by string, err error) {
	_ = c.conn.SetReadDeadline(time.Now().Add(15 * time.Second))
	resp, err := http.ReadResponse(c.reader, &http.Request{Method: "POST"})
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, resp.Header.Get("X-Served-By"), err
}

// LNK-2: POSTs that begin at the very moment at which their placement is
// closed by plan are neither lost nor sent twice.
func TestNudge_POSTsAtAPlannedClose(t *testing.T) {
	rec := &received{ids: map[string]int{}, last: map[string]int{}}
	p := newInprocess(t, map[string]http.Handler{"a": rec.handler("a"), "b": rec.handler("b")})
	var clients []*keptClient
	for range nudgeConns {
		c := &keptClient{addr: p.address()}
		c.dial(t)
		clients = append(clients, c)
	}
	reloads := p.reloads()
	sent, within, toClosing, late, round := 0, 0, 0, 0, 0
	// batch sends one POST on every connection and returns how many of them the
	// placement answered.
	batch := func(prefix string, by *inprocessNode) (n int) {
		for i, c := range clients {
			if c.used >= keptMost {
				c.dial(t)
			}
			require.NoError(t, c.send(postBytes("/warm", fmt.Sprintf("%s-%d", prefix, i))))
		}
		for i, c := range clients {
			status, who, err := c.answer()
			require.NoError(t, err, "%s-%d", prefix, i)
			require.Equal(t, 200, status, "%s-%d", prefix, i)
			if who == by.name {
				n++
			}
		}
		return n
	}
	var offsets []time.Duration
	for ; within < nudgePOSTs && round < nudgeRounds; round++ {
		closing := p.nodes["a"]
		if round%2 == 1 {
			closing = p.nodes["b"]
		}
		// Warm connections of nginx to both.
		batch(fmt.Sprintf("warm-%d", round), closing)
		requests := make([][]byte, nudgeConns)
		due := make([]time.Duration, nudgeConns)
		for i := range requests {
			requests[i] = postBytes("/", fmt.Sprintf("nudge-%d-%d", round, i))
			due[i] = time.Duration(rand.Int64N(int64(2*nudgeSpread))) - nudgeSpread
		}
		slices.Sort(due)
		at := time.Now().Add(2 * time.Millisecond)
		var closed time.Time
		done := make(chan struct{})
		go func() {
			defer close(done)
			spinUntil(at)
			closed = time.Now()
			p.drain(closing)
		}()
		times := make([]time.Time, nudgeConns)
		for i, c := range clients {
			spinUntil(at.Add(due[i]))
			times[i] = time.Now()
			require.NoError(t, c.send(requests[i]))
		}
		<-done
		for i, c := range clients {
			status, by, err := c.answer()
			id := fmt.Sprintf("nudge-%d-%d", round, i)
			require.NoError(t, err, "%s, sent %v from the close", id, times[i].Sub(closed))
			require.Equal(t, 200, status, "%s, sent %v from the close", id, times[i].Sub(closed))
			sent++
			if off := times[i].Sub(closed); off.Abs() <= nudgeSpread {
				within++
				offsets = append(offsets, off)
				if by == closing.name {
					toClosing++
				}
			}
		}
		p.await(5*time.Second, "the link is no longer open", func() bool { return p.state(closing).String() == "joined" })
		<-time.After(nudgedMost)
		late += batch(fmt.Sprintf("late-%d", round), closing)
		if round%50 == 0 {
			<-time.After(nudgedWithin)
			require.Zero(t, batch(fmt.Sprintf("after-%d", round), closing), "no request reaches a placement that was closed")
		}
		p.serve(closing)
	}
	require.GreaterOrEqual(t, within, nudgePOSTs, "the machine is too busy to hit the moment")
	rec.mu.Lock()
	defer rec.mu.Unlock()
	delivered := 0
	for id, n := range rec.ids {
		require.Equal(t, 1, n, "%s was delivered %d times", id, n)
		if strings.HasPrefix(id, "nudge-") {
			delivered++
		}
	}
	require.Equal(t, sent, delivered, "every POST was delivered")
	require.Equal(t, reloads, p.reloads(), "nginx was reloaded meanwhile, which loses requests by itself")
	slices.Sort(offsets)
	t.Logf("%d planned closes, %d POSTs sent, %d of them within ±%v of the close (median offset %v), %d answered by the closing placement: 0 lost, 0 doubled; "+
		"of %d POSTs after another %v, %d still went to the closed one",
		round, sent, within, nudgeSpread, offsets[len(offsets)/2].Round(time.Microsecond), toClosing, round*nudgeConns, nudgedMost, late)
}

func spinUntil(at time.Time) {
	if d := time.Until(at) - time.Millisecond; d > 0 {
		<-time.After(d)
	}
	for time.Now().Before(at) {
	}
}

// LNK-2: what runs when its placement is closed by plan runs to its end.
func TestNudge_RunningStreamsSurvive(t *testing.T) {
	rec := &received{ids: map[string]int{}, last: map[string]int{}}
	p := newInprocess(t, map[string]http.Handler{"a": rec.handler("a"), "b": rec.handler("b")})
	type outcome struct {
		by, path string
		bytes    int
		err      error
	}
	results := make(chan outcome, 8)
	for i := range cap(results) {
		// One after the other, so that nginx puts each kind on both in turn.
		path := []string{"/download", "/events"}[i/2%2]
		resp, err := http.DefaultClient.Do(longRequest(t, p.address(), path))
		require.NoError(t, err)
		go func() {
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if path == "/events" && err == nil && !strings.Contains(string(body), fmt.Sprintf("id: %d\n", longRun*10-1)) {
				err = fmt.Errorf("the last event is missing")
			}
			results <- outcome{by: resp.Header.Get("X-Served-By"), path: path, bytes: len(body), err: err}
		}()
	}
	p.await(5*time.Second, "all run", func() bool {
		rec.mu.Lock()
		defer rec.mu.Unlock()
		return rec.last["a"]+rec.last["b"] == cap(results)
	})
	p.drain(p.nodes["a"])
	count := map[string]int{}
	for range cap(results) {
		r := <-results
		require.NoError(t, r.err, "%s by %s after %d bytes", r.path, r.by, r.bytes)
		count[r.path+" by "+r.by]++
	}
	require.NotZero(t, count["/download by a"], "%v", count)
	require.NotZero(t, count["/events by a"], "%v", count)
	p.await(5*time.Second, "nothing is left at the closed placement", func() bool { return p.nodes["a"].links.Acceptor.Streams() == 0 })
	t.Logf("closed by plan under %d-second streams, all whole: %v", longRun, count)
}

func longRequest(t *testing.T, addr, path string) *http.Request {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+path, nil)
	require.NoError(t, err)
	req.Host = webHost
	return req
}

// LNK-2, STP-1: where nothing else serves, nginx puts every request on the
// connections that it has kept, so they are never idle. They end all the same,
// and every request is either served or answered with 503.
func TestNudge_NothingElseServes(t *testing.T) {
	rec := &received{ids: map[string]int{}, last: map[string]int{}}
	p := newInprocess(t, map[string]http.Handler{"a": rec.handler("a"), "b": rec.handler("b")})
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer func() { stop(); clients.Wait() }()
	var mu sync.Mutex
	statuses := map[string]int{}
	client := http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: busyClients}}
	for i := range busyClients {
		clients.Go(func() {
			for ctx.Err() == nil {
				method := []string{http.MethodGet, http.MethodPost}[i%2]
				req, err := http.NewRequest(method, "http://"+p.address()+"/", strings.NewReader("hello"))
				if err != nil {
					panic(err)
				}
				req.Host = webHost
				resp, err := client.Do(req)
				outcome := fmt.Sprintf("%s %v", method, err)
				if err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
					outcome = fmt.Sprintf("%s %d", method, resp.StatusCode)
				}
				mu.Lock()
				statuses[outcome]++
				mu.Unlock()
			}
		})
	}
	<-time.After(time.Second)
	began := time.Now()
	for _, n := range p.nodes {
		p.drain(n)
	}
	before := rec.count()
	p.await(5*time.Second, "no stream is left while the requests go on", func() bool {
		return p.nodes["a"].links.Acceptor.Streams()+p.nodes["b"].links.Acceptor.Streams() == 0
	})
	took, after := time.Since(began), rec.count()-before
	stop()
	clients.Wait()
	t.Logf("%d busy clients: the last stream ended %v and %d requests after the close; %v", busyClients, took.Round(time.Millisecond), after, statuses)
	require.LessOrEqual(t, after, 2*busyClients, "a connection serves the request that is under way, and perhaps one more")
	require.NotZero(t, statuses["GET 200"]*statuses["POST 200"]*statuses["GET 503"]*statuses["POST 503"])
	require.Len(t, statuses, 4, "nothing but 200 and 503: %v", statuses)
}
