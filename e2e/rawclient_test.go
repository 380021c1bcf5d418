package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/system"
)

// rawLimit bounds one request of the raw client. It is above every time-out
// of the path.
const rawLimit = 40 * time.Second

// rawRequest is a request that is sent exactly once, on a connection of its
// own: a client library would repeat some by itself.
type rawRequest struct {
	method, path, id string
	body             string
	header           []string // whole lines
}

// rawAnswer is what came back. err tells a response that was cut from one
// that is whole.
type rawAnswer struct {
	status int
	header http.Header
	body   string
	err    error
	took   time.Duration
}

// cut reports whether the client can tell that the response is not whole.
func (a rawAnswer) cut() bool { return a.err != nil && !errors.Is(a.err, context.DeadlineExceeded) }

func (r rawRequest) encode(host string) string {
	sep := "?"
	if strings.Contains(r.path, "?") {
		sep = "&"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s%srid=%s HTTP/1.1\r\nHost: %s\r\nX-Request-Id: %s\r\nConnection: close\r\n", r.method, r.path, sep, r.id, host, r.id)
	if r.body != "" || r.method != http.MethodGet {
		fmt.Fprintf(&b, "Content-Length: %d\r\n", len(r.body))
	}
	for _, line := range r.header {
		b.WriteString(line + "\r\n")
	}
	return b.String() + "\r\n" + r.body
}

// rawDial connects to the ingress node as a client does.
func (sc *scene) rawDial(port uint16) net.Conn {
	sc.t.Helper()
	conn, err := sc.Client().DialContext(context.Background(), "tcp", sc.Ingress.HostPort(port))
	require.NoError(sc.t, err)
	require.NoError(sc.t, conn.SetDeadline(time.Now().Add(rawLimit)))
	return conn
}

// raw sends a request to the host of the scene; received, if not nil, counts
// the body bytes while they arrive.
func (sc *scene) raw(r rawRequest, received *atomic.Int64) (a rawAnswer) {
	begun := time.Now()
	defer func() { a.took = time.Since(begun) }()
	conn, err := sc.Client().DialContext(context.Background(), "tcp", sc.Ingress.HostPort(system.HTTPPort))
	if err != nil {
		return rawAnswer{err: err}
	}
	defer conn.Close()
	_ = conn.SetDeadline(begun.Add(rawLimit))
	if _, err := io.WriteString(conn, r.encode(webHost)); err != nil {
		return rawAnswer{err: err}
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: r.method})
	if err != nil {
		return rawAnswer{err: err}
	}
	defer resp.Body.Close()
	if received == nil {
		received = new(atomic.Int64)
	}
	body, err := io.ReadAll(io.TeeReader(resp.Body, counter{received}))
	return rawAnswer{status: resp.StatusCode, header: resp.Header, body: string(body), err: err}
}

type counter struct{ n *atomic.Int64 }

func (c counter) Write(p []byte) (int, error) {
	c.n.Add(int64(len(p)))
	return len(p), nil
}

// delivered counts how often the applications received each request id.
func (sc *scene) delivered() map[string]int {
	count := map[string]int{}
	for _, rec := range sc.Env.Deliveries() {
		if rec.Phase == "received" {
			count[rec.ID]++
		}
	}
	return count
}
