package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/opfield/availability/e2e/delivery"
)

type app struct {
	name          string
	recorder      *delivery.Recorder
	unhealthyFile string
	unhealthy     atomic.Bool
	requests      atomic.Uint64
}

func (a *app) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", a.healthz)
	mux.HandleFunc("/health/up", func(http.ResponseWriter, *http.Request) { a.unhealthy.Store(false) })
	mux.HandleFunc("/health/down", func(http.ResponseWriter, *http.Request) { a.unhealthy.Store(true) })
	mux.HandleFunc("/slow", a.slow)
	mux.HandleFunc("/status", a.status)
	mux.HandleFunc("/abort", func(w http.ResponseWriter, r *http.Request) { a.partial(w, r, "close", "reset") })
	mux.HandleFunc("/drop", a.drop)
	mux.HandleFunc("/until-close", func(w http.ResponseWriter, r *http.Request) { a.partial(w, r, "close", "complete") })
	mux.HandleFunc("/partial", func(w http.ResponseWriter, r *http.Request) {
		a.partial(w, r, r.FormValue("mode"), r.FormValue("end"))
	})
	mux.HandleFunc("/sse", a.sse)
	mux.HandleFunc("/download", a.download)
	mux.HandleFunc("/bytes", a.bytes)
	mux.HandleFunc("/echo", a.echo)
	mux.HandleFunc("/upload", a.upload)
	mux.HandleFunc("/headers", a.headers)
	mux.HandleFunc("/ws", a.webSocket)
	mux.HandleFunc("/", a.ok)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" {
			mux.ServeHTTP(w, r)
			return
		}
		a.requests.Add(1)
		query := r.URL.Query()
		id := query.Get("rid")
		if id == "" {
			id = r.Header.Get("X-Request-Id")
		}
		add := func(phase delivery.Phase) {
			rec := delivery.Record{ID: id, Method: r.Method, Path: r.URL.Path, Phase: phase, At: time.Now(), Conn: r.RemoteAddr}
			if err := a.recorder.Add(rec); err != nil {
				log.Fatalf("record a delivery: %v", err) // counting wrongly is worse than ending
			}
		}
		add(delivery.Received)
		if r.Method != http.MethodGet {
			r.Body = &endReader{ReadCloser: r.Body, atEnd: func() { add(delivery.Body) }}
		}
		w.Header().Set("X-Served-By", a.name)
		w.Header().Set("X-Echo-Id", id)
		if query.Has("close") {
			w.Header().Set("Connection", "close")
		}
		if strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
			a.grpc(w, r)
		} else {
			mux.ServeHTTP(w, r)
		}
		add(delivery.Done)
	})
}

// endReader tells once when the body was read to its end.
type endReader struct {
	io.ReadCloser
	atEnd func()
	ended bool
}

func (e *endReader) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if err == io.EOF && !e.ended {
		e.ended = true
		e.atEnd()
	}
	return n, err
}

func number(r *http.Request, key string, fallback int) int {
	if n, err := strconv.Atoi(r.URL.Query().Get(key)); err == nil {
		return n
	}
	return fallback
}

func (a *app) healthz(w http.ResponseWriter, _ *http.Request) {
	if _, err := os.Stat(a.unhealthyFile); err == nil || a.unhealthy.Load() {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "healthy")
}

// ok answers at once, after it read the body.
func (a *app) ok(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body) // a cut body shows in the record
	fmt.Fprintf(w, "ok %s\n", a.name)
}

// slow answers after ?ms=.
func (a *app) slow(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	select {
	case <-time.After(time.Duration(number(r, "ms", 100)) * time.Millisecond):
	case <-r.Context().Done():
		return
	}
	fmt.Fprintf(w, "slow %s\n", a.name)
}

// status answers with ?code=, a body of its own and Retry-After; with ?by=
// only the named application does, others answer 200.
func (a *app) status(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	code := number(r, "code", 200)
	if by := r.URL.Query().Get("by"); by != "" && by != a.name {
		code = http.StatusOK
	}
	if code >= 500 {
		w.Header().Set("Retry-After", "7")
	}
	w.WriteHeader(code)
	fmt.Fprintf(w, "application says %d from %s\n", code, a.name)
}

// drop takes the request and resets its connection before any response byte;
// with ?by= only the named application does, others answer.
func (a *app) drop(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	if by := r.URL.Query().Get("by"); by != "" && by != a.name {
		fmt.Fprintf(w, "ok %s\n", a.name)
		return
	}
	panic(http.ErrAbortHandler)
}

// sse sends ?n= events, one every ?ms=.
func (a *app) sse(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	for i := range number(r, "n", 1<<30) {
		fmt.Fprintf(w, "id: %d\ndata: %s\n\n", i, a.name)
		if out.Flush() != nil {
			return
		}
		select {
		case <-time.After(time.Duration(number(r, "ms", 100)) * time.Millisecond):
		case <-r.Context().Done():
			return
		}
	}
}

// download sends ?kb= kilobytes spread over ?seconds= with a Content-Length.
func (a *app) download(w http.ResponseWriter, r *http.Request) {
	const pieces = 50 // per second
	seconds, size := number(r, "seconds", 20), number(r, "kb", 1000)<<10
	total := max(seconds*pieces, 1)
	w.Header().Set("Content-Length", strconv.Itoa(size))
	out := http.NewResponseController(w)
	for i := range total {
		piece := make([]byte, size*(i+1)/total-size*i/total)
		fill(piece, size*i/total)
		if _, err := w.Write(piece); err != nil {
			return
		}
		_ = out.Flush()
		if seconds > 0 {
			time.Sleep(time.Second / pieces)
		}
	}
}

// bytes sends ?n= bytes, with ?chunked=1 without a length.
func (a *app) bytes(w http.ResponseWriter, r *http.Request) {
	n := number(r, "n", 1024)
	if r.URL.Query().Get("chunked") == "" {
		w.Header().Set("Content-Length", strconv.Itoa(n))
	}
	piece := make([]byte, 64<<10)
	for sent := 0; sent < n; {
		part := piece[:min(len(piece), n-sent)]
		fill(part, sent)
		if _, err := w.Write(part); err != nil {
			return
		}
		sent += len(part)
	}
}

// echo sends the body back while it arrives.
func (a *app) echo(w http.ResponseWriter, r *http.Request) {
	out := http.NewResponseController(w)
	_ = out.EnableFullDuplex() // HTTP/2 has it anyway
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Body.Read(buf)
		if n > 0 {
			if _, werr := w.Write(buf[:n]); werr != nil {
				return
			}
			_ = out.Flush()
		}
		if err != nil {
			return
		}
	}
}

// upload answers with the length and the digest of the body.
func (a *app) upload(w http.ResponseWriter, r *http.Request) {
	sum := sha256.New()
	n, err := io.Copy(sum, r.Body)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprintf(w, "after %d bytes: %v\n", n, err)
		return
	}
	fmt.Fprintf(w, "%d %x\n", n, sum.Sum(nil))
}

// headers answers with the request as it arrived.
func (a *app) headers(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{
		"method": r.Method, "uri": r.RequestURI, "host": r.Host, "proto": r.Proto, "peer": r.RemoteAddr, "header": r.Header,
	})
}

// grpc answers every call with its own message, as a unary or bidirectional
// echo would, and status 0 (or ?grpc-status header asked for).
func (a *app) grpc(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/grpc")
	w.Header().Set("Trailer", "Grpc-Status")
	w.WriteHeader(http.StatusOK)
	a.echo(w, r)
	status := r.Header.Get("X-Want-Status")
	if status == "" {
		status = "0"
	}
	w.Header().Set("Grpc-Status", status)
}

// fill makes content whose every byte depends on its place.
func fill(p []byte, offset int) {
	for i := range p {
		p[i] = byte((offset + i) * 131 >> 3)
	}
}
