package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/e2e/lab"
	"github.com/opfield/availability/e2e/system"
)

const (
	grpcPort     = 8081 // plain HTTP/2 of the ingress node
	grpcHost     = "rpc.example"
	echoPort     = 9100
	proxyPort    = 9101
	uploadBytes  = 200 << 20
	uploadWithin = 2 * time.Minute
	soon         = time.Second
)

// RTE-5, RTE-1: every protocol over the whole product.
func TestProtocols(t *testing.T) {
	sc := newScene(t, system.Config{Relays: 1, Nodes: 2}, false)
	var links []string
	for _, n := range sc.Nodes {
		n.RunApp(lab.App{Workload: "rpc", Protocol: "grpc"})
		n.RunApp(lab.App{Workload: "tcp", Protocol: "tcp", Ports: "9000"})
		links = append(links, "rpc."+n.ID+"/8080", "tcp."+n.ID+"/9000")
	}
	file := sc.Controller.WriteFile("routes.yaml", fmt.Sprintf(`routes:
- {name: rpc, protocol: grpc, hosts: [%s], workload: rpc, port: 8080}
- {name: echo, protocol: tcp, workload: tcp, port: 9000, listen: %d}
- {name: echo-proxy, protocol: tcp, workload: tcp, port: 9000, listen: %d, settings: {proxyProtocol: true}}
`, grpcHost, echoPort, proxyPort))
	sc.MustCLI("route", "apply", "-f", file)
	sc.AwaitLinks(20*time.Second, "open", links...)
	sc.Env.Await(20*time.Second, "all routes are served", func() bool {
		st, err := sc.IngressStatus()
		return err == nil && len(st.Routes) == 4 && !st.Reload.Pending
	})

	t.Run("WebSocket", sc.webSocket)
	t.Run("gRPC", sc.grpc)
	t.Run("half-close", sc.halfClose)
	t.Run("PROXY protocol", sc.proxyProtocol)
	t.Run("events", sc.events)
	t.Run("headers", sc.headers)
	t.Run("upload with a length", func(t *testing.T) { sc.upload(t, false) })
	t.Run("upload in chunks", func(t *testing.T) { sc.upload(t, true) })
	t.Run("gRPC with nothing that serves", sc.grpcDown)
}

func (sc *scene) webSocket(t *testing.T) {
	conn := sc.rawDial(system.HTTPPort)
	defer conn.Close()
	_, err := fmt.Fprintf(conn, "GET /ws HTTP/1.1\r\nHost: %s\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", webHost)
	require.NoError(t, err)
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	require.NoError(t, err)
	require.Equal(t, 101, resp.StatusCode)
	require.Equal(t, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", resp.Header.Get("Sec-WebSocket-Accept"))
	for _, size := range []int{1, 125, 126, 40000, 1 << 16, 1 << 20} {
		payload := make([]byte, size)
		_, _ = rand.Read(payload)
		begun := time.Now()
		_, err := conn.Write(webSocketFrame(2, payload))
		require.NoError(t, err)
		got, err := readWebSocketFrame(r)
		require.NoError(t, err)
		require.True(t, bytes.Equal(payload, got), "%d bytes come back as sent", size)
		t.Logf("message of %d bytes echoed in %v", size, time.Since(begun).Round(10*time.Microsecond))
	}
	_, err = conn.Write(webSocketFrame(8, nil))
	require.NoError(t, err)
	_, err = readWebSocketFrame(r)
	require.NoError(t, err, "the close is answered")
}

// webSocketFrame is one masked message (RFC 6455 section 5.2).
func webSocketFrame(op byte, payload []byte) []byte {
	frame := []byte{0x80 | op}
	switch n := len(payload); {
	case n < 126:
		frame = append(frame, 0x80|byte(n))
	case n < 1<<16:
		frame = binary.BigEndian.AppendUint16(append(frame, 0x80|126), uint16(n))
	default:
		frame = binary.BigEndian.AppendUint64(append(frame, 0x80|127), uint64(n))
	}
	mask := [4]byte{1, 2, 3, 4}
	frame = append(frame, mask[:]...)
	for i, b := range payload {
		frame = append(frame, b^mask[i&3])
	}
	return frame
}

func readWebSocketFrame(r io.Reader) ([]byte, error) {
	head := make([]byte, 2)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	size := uint64(head[1])
	switch size {
	case 126:
		b := make([]byte, 2)
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		size = uint64(binary.BigEndian.Uint16(b))
	case 127:
		b := make([]byte, 8)
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		size = binary.BigEndian.Uint64(b)
	}
	payload := make([]byte, size)
	_, err := io.ReadFull(r, payload)
	return payload, err
}

// grpcClient speaks HTTP/2 without TLS to the ingress node.
func (sc *scene) grpcClient(t *testing.T) *http.Client {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: protocols, DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return sc.Client().DialContext(ctx, network, sc.Ingress.HostPort(grpcPort))
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: rawLimit}
}

func grpcMessage(text string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(text))), text...)
}

func grpcRequest(t *testing.T, body io.Reader) *http.Request {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+grpcHost+"/test.Echo/Echo", body)
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("TE", "trailers")
	return req
}

func (sc *scene) grpc(t *testing.T) {
	client := sc.grpcClient(t)
	served := map[string]int{}
	for i := range 40 {
		want := grpcMessage(fmt.Sprintf("unary call %d", i))
		resp, err := client.Do(grpcRequest(t, bytes.NewReader(want)))
		require.NoError(t, err)
		got, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, 200, resp.StatusCode)
		require.Equal(t, want, got)
		require.Equal(t, "0", resp.Trailer.Get("Grpc-Status"))
		served[resp.Header.Get("X-Served-By")]++
	}
	require.NotZero(t, len(served))

	// A call in both directions at once: every message comes back before the
	// next one is sent.
	body, send := io.Pipe()
	type opened struct {
		resp *http.Response
		err  error
	}
	answer := make(chan opened, 1)
	go func() {
		resp, err := client.Do(grpcRequest(t, body))
		answer <- opened{resp, err}
	}()
	_, err := send.Write(grpcMessage("message 0"))
	require.NoError(t, err)
	o := <-answer
	require.NoError(t, o.err)
	defer o.resp.Body.Close()
	var slowest time.Duration
	for i := range 20 {
		begun, want := time.Now(), grpcMessage(fmt.Sprintf("message %d", i))
		if i > 0 {
			_, err := send.Write(want)
			require.NoError(t, err)
		}
		got := make([]byte, len(want))
		_, err := io.ReadFull(o.resp.Body, got)
		require.NoError(t, err)
		require.Equal(t, want, got)
		slowest = max(slowest, time.Since(begun))
	}
	require.NoError(t, send.Close())
	rest, err := io.ReadAll(o.resp.Body)
	require.NoError(t, err)
	require.Empty(t, rest)
	require.Equal(t, "0", o.resp.Trailer.Get("Grpc-Status"))
	require.Less(t, slowest, soon)
	t.Logf("40 unary calls served by %v; 20 messages each way in one call, the slowest echo %v", served, slowest.Round(10*time.Microsecond))
}

// grpcDown is the end of the scene: it stops the placements.
func (sc *scene) grpcDown(t *testing.T) {
	for _, n := range sc.Nodes {
		n.Agent.Kill()
	}
	sc.Env.Await(10*time.Second, "no link is open", func() bool {
		return sc.LinkState("rpc.node-1/8080") != "open" && sc.LinkState("rpc.node-2/8080") != "open"
	})
	begun := time.Now()
	resp, err := sc.grpcClient(t).Do(grpcRequest(t, bytes.NewReader(grpcMessage("nobody"))))
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	status := resp.Header.Get("Grpc-Status") + resp.Trailer.Get("Grpc-Status")
	require.Equal(t, "14", status)
	t.Logf("nothing serves: status %s after %v", status, time.Since(begun).Round(time.Millisecond))
}

func (sc *scene) halfClose(t *testing.T) {
	conn := sc.rawDial(echoPort)
	defer conn.Close()
	want := make([]byte, 3<<20)
	_, _ = rand.Read(want)
	go func() {
		_, _ = conn.Write(want) // an error shows as a short echo
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got), "sent %d bytes, then the end, and received %d", len(want), len(got))

	// The client ends its side first and the answer comes after that.
	quiet := sc.rawDial(echoPort)
	defer quiet.Close()
	_, err = quiet.Write([]byte("question"))
	require.NoError(t, err)
	require.NoError(t, quiet.(*net.TCPConn).CloseWrite())
	got, err = io.ReadAll(quiet)
	require.NoError(t, err)
	require.Equal(t, "question", string(got))
}

func (sc *scene) proxyProtocol(t *testing.T) {
	for range 5 {
		conn := sc.rawDial(proxyPort)
		_, err := conn.Write([]byte("question\n"))
		require.NoError(t, err)
		require.NoError(t, conn.(*net.TCPConn).CloseWrite())
		got, err := io.ReadAll(conn)
		require.NoError(t, err)
		local, remote := conn.LocalAddr().(*net.TCPAddr), conn.RemoteAddr().(*net.TCPAddr)
		want := fmt.Sprintf("PROXY TCP4 %s %s %d %d\r\nquestion\n", local.IP, remote.IP, local.Port, remote.Port)
		require.Equal(t, want, string(got), "the application gets the line, then the bytes")
		require.NoError(t, conn.Close())
	}
	// The other route of the same workload has none.
	conn := sc.rawDial(echoPort)
	defer conn.Close()
	_, err := conn.Write([]byte("question\n"))
	require.NoError(t, err)
	require.NoError(t, conn.(*net.TCPConn).CloseWrite())
	got, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Equal(t, "question\n", string(got))
}

func (sc *scene) events(t *testing.T) {
	conn := sc.rawDial(system.HTTPPort)
	defer conn.Close()
	_, err := io.WriteString(conn, rawRequest{method: "GET", path: "/sse?n=10&ms=300", id: "events"}.encode(webHost))
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	last, n := time.Now(), 0
	var slowest time.Duration
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "id: ") {
			slowest = max(slowest, time.Since(last))
			last, n = time.Now(), n+1
		}
	}
	require.NoError(t, lines.Err())
	require.Equal(t, 10, n)
	require.Less(t, slowest, soon, "events of every 300 ms arrive one by one")
	t.Logf("10 events, at most %v apart", slowest.Round(time.Millisecond))
}

func (sc *scene) headers(t *testing.T) {
	a := sc.raw(rawRequest{method: "GET", path: "/headers", id: "headers", header: []string{
		"X-Large: " + strings.Repeat("l", 28<<10), "X-Forwarded-For: 6.6.6.6", "X-Forwarded-Proto: https",
	}}, nil)
	require.NoError(t, a.err)
	require.Equal(t, 200, a.status)
	var seen struct {
		Host   string
		Header http.Header
	}
	require.NoError(t, json.Unmarshal([]byte(a.body), &seen))
	require.Equal(t, webHost, seen.Host)
	require.Equal(t, "headers", seen.Header.Get("X-Request-Id"))
	require.Equal(t, sc.Client().Addr().String(), seen.Header.Get("X-Forwarded-For"), "what a client claims does not count")
	require.Equal(t, "http", seen.Header.Get("X-Forwarded-Proto"))
	require.Equal(t, webHost, seen.Header.Get("X-Forwarded-Host"))
	require.Len(t, seen.Header.Get("X-Large"), 28<<10)
}

// upload sends 200 MB, with a length or in chunks.
func (sc *scene) upload(t *testing.T, chunked bool) {
	begun := time.Now()
	conn := sc.rawDial(system.HTTPPort)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(begun.Add(uploadWithin)))
	piece := make([]byte, 1<<20)
	_, _ = rand.Read(piece)
	sum := sha256.New()
	w := bufio.NewWriter(conn)
	framing := fmt.Sprintf("Content-Length: %d", uploadBytes)
	if chunked {
		framing = "Transfer-Encoding: chunked"
	}
	_, err := fmt.Fprintf(w, "POST /upload?rid=upload-%t HTTP/1.1\r\nHost: %s\r\n%s\r\n\r\n", chunked, webHost, framing)
	require.NoError(t, err)
	for i := range uploadBytes / len(piece) {
		binary.BigEndian.PutUint32(piece, uint32(i)) // every piece differs
		_, _ = sum.Write(piece)
		if chunked {
			_, err = fmt.Fprintf(w, "%x\r\n%s\r\n", len(piece), piece)
		} else {
			_, err = w.Write(piece)
		}
		require.NoError(t, err)
	}
	if chunked {
		_, err = w.WriteString("0\r\n\r\n")
		require.NoError(t, err)
	}
	require.NoError(t, w.Flush())
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, 200, resp.StatusCode, "%s", body)
	require.Equal(t, fmt.Sprintf("%d %x\n", uploadBytes, sum.Sum(nil)), string(body))
	t.Logf("%d MB in %v", uploadBytes>>20, time.Since(begun).Round(time.Millisecond))
}
