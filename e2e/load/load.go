// Package load sends requests at a constant rate and classifies every single
// one: what came back, how long it took, on which kind of connection, and,
// joined with the application's own record, how often it was delivered.
//
// It speaks HTTP/1.1 by hand, because a client library repeats requests by
// itself and hides what the tests must count. A Run has a fixed number of
// requests: it ends by itself, or earlier by Stop.
package load

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Dial opens a connection; a lab host's DialContext is one.
type Dial func(ctx context.Context, network, address string) (net.Conn, error)

// Stream is one constant flow of requests.
type Stream struct {
	Name   string // "get-fresh"; part of the request ids
	Method string
	Path   string  // path and query, "/ok"
	Rate   float64 // requests per second
	Fresh  bool    // a new connection for every request, else kept-alive ones
	Body   []byte
	Header map[string]string
}

// Config describes a run.
type Config struct {
	Dial     Dial
	Address  string // "10.210.0.1:8080"
	Host     string // Host header
	Streams  []Stream
	Duration time.Duration // after it no new request begins
	Timeout  time.Duration // of one request; default 30 s
	MaxOpen  int           // requests in flight at most; default 4096
}

// Kind says how a request ended.
type Kind string

// The ends of a request.
const (
	Complete   Kind = "complete"    // a whole response, whatever its status
	Refused    Kind = "refused"     // the connection was refused
	NoConnect  Kind = "no-connect"  // the connection was not made for another reason
	NotSent    Kind = "not-sent"    // the request could not be written
	NoResponse Kind = "no-response" // the connection ended before a response byte
	Cut        Kind = "cut"         // the response ended early
	TimedOut   Kind = "timed-out"   // our own limit was reached
	Mixed      Kind = "mixed-up"    // the response belongs to another request
	Skipped    Kind = "skipped"     // too many requests in flight: the generator's own failure
)

// Result is what became of one request.
type Result struct {
	ID       string
	Stream   string
	Method   string
	Start    time.Time
	Connect  time.Duration // 0 on a kept-alive connection
	Latency  time.Duration // from Start to the last byte, connecting included
	First    bool          // it was the first request of its connection
	Kind     Kind
	Status   int
	ServedBy string // X-Served-By of the application
	Err      string
}

// OK reports a whole response with status 200.
func (r Result) OK() bool { return r.Kind == Complete && r.Status == http.StatusOK }

// Run is a running load.
type Run struct {
	config Config
	began  time.Time
	stop   context.CancelFunc
	done   chan struct{}

	mu      sync.Mutex
	results []Result
	idle    map[string][]*conn // by stream, the latest used last
}

type conn struct {
	net.Conn
	reader *bufio.Reader
	used   int
}

// Start begins the load. Requests are sent at their due times whether or not
// earlier ones were answered.
func Start(config Config) *Run {
	if config.Timeout == 0 {
		config.Timeout = 30 * time.Second
	}
	if config.MaxOpen == 0 {
		config.MaxOpen = 4096
	}
	if config.Dial == nil {
		config.Dial = new(net.Dialer).DialContext
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &Run{config: config, began: time.Now(), stop: cancel, done: make(chan struct{}), idle: map[string][]*conn{}}
	go r.run(ctx)
	return r
}

// Stop begins no further request, waits for those in flight and returns the
// report.
func (r *Run) Stop() *Report {
	r.stop()
	return r.Wait()
}

// Wait waits until the duration is over and every request ended.
func (r *Run) Wait() *Report {
	<-r.done
	return &Report{Began: r.began, Results: r.results}
}

// Results returns what ended so far.
func (r *Run) Results() []Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]Result(nil), r.results...)
}

func (r *Run) run(ctx context.Context) {
	defer close(r.done)
	var streams, requests sync.WaitGroup
	open := make(chan struct{}, r.config.MaxOpen)
	for _, s := range r.config.Streams {
		streams.Go(func() { r.runStream(ctx, s, open, &requests) })
	}
	streams.Wait()
	requests.Wait()
	r.stop()
	for _, conns := range r.idle {
		for _, c := range conns {
			c.Close()
		}
	}
}

func (r *Run) runStream(ctx context.Context, s Stream, open chan struct{}, requests *sync.WaitGroup) {
	total := int(s.Rate * r.config.Duration.Seconds())
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := range total {
		due := r.began.Add(time.Duration(float64(i) / s.Rate * float64(time.Second)))
		timer.Reset(time.Until(due))
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		id := fmt.Sprintf("%s-%06d", s.Name, i)
		select {
		case open <- struct{}{}:
		default:
			r.add(Result{ID: id, Stream: s.Name, Method: s.Method, Start: time.Now(), Kind: Skipped})
			continue
		}
		requests.Go(func() {
			defer func() { <-open }()
			r.add(r.request(s, id))
		})
	}
}

func (r *Run) add(result Result) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.results = append(r.results, result)
}

// request sends one request, once.
func (r *Run) request(s Stream, id string) (res Result) {
	res = Result{ID: id, Stream: s.Name, Method: s.Method, Start: time.Now()}
	defer func() { res.Latency = time.Since(res.Start) }()
	fail := func(kind Kind, err error) Result {
		res.Kind, res.Err = kind, err.Error()
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
			res.Kind = TimedOut
		}
		return res
	}
	deadline := res.Start.Add(r.config.Timeout)
	c := r.take(s)
	if c == nil {
		ctx, cancel := context.WithDeadline(context.Background(), deadline)
		defer cancel()
		raw, err := r.config.Dial(ctx, "tcp", r.config.Address)
		res.Connect = time.Since(res.Start)
		if err != nil {
			if errors.Is(err, syscall.ECONNREFUSED) {
				return fail(Refused, err)
			}
			return fail(NoConnect, err)
		}
		c = &conn{Conn: raw, reader: bufio.NewReader(raw)}
	}
	keep := false
	defer func() {
		if keep && !s.Fresh {
			r.put(s, c)
		} else {
			c.Close()
		}
	}()
	res.First = c.used == 0
	c.used++
	if err := c.SetDeadline(deadline); err != nil {
		return fail(NotSent, err)
	}
	if _, err := c.Write(r.encode(s, id)); err != nil {
		return fail(NotSent, err)
	}
	if _, err := c.reader.Peek(1); err != nil {
		return fail(NoResponse, err)
	}
	resp, err := http.ReadResponse(c.reader, &http.Request{Method: s.Method})
	if err != nil {
		return fail(Cut, err)
	}
	defer resp.Body.Close()
	res.Status, res.ServedBy = resp.StatusCode, resp.Header.Get("X-Served-By")
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return fail(Cut, err)
	}
	if echoed := resp.Header.Get("X-Echo-Id"); echoed != "" && echoed != id {
		return fail(Mixed, fmt.Errorf("response to %s", echoed))
	}
	res.Kind = Complete
	keep = !resp.Close
	return res
}

func (r *Run) encode(s Stream, id string) []byte {
	sep := "?"
	if strings.Contains(s.Path, "?") {
		sep = "&"
	}
	host := r.config.Host
	if host == "" {
		host = r.config.Address
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s%srid=%s HTTP/1.1\r\nHost: %s\r\nX-Request-Id: %s\r\n", s.Method, s.Path, sep, url.QueryEscape(id), host, id)
	for key, value := range s.Header {
		fmt.Fprintf(&b, "%s: %s\r\n", key, value)
	}
	if s.Fresh {
		b.WriteString("Connection: close\r\n")
	}
	if len(s.Body) > 0 || s.Method != http.MethodGet {
		fmt.Fprintf(&b, "Content-Length: %d\r\n", len(s.Body))
	}
	b.WriteString("\r\n")
	b.Write(s.Body)
	return []byte(b.String())
}

// take returns the idle connection of the stream that was used last, if the
// server has not closed it meanwhile.
func (r *Run) take(s Stream) *conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	for list := r.idle[s.Name]; len(list) > 0; list = r.idle[s.Name] {
		c := list[len(list)-1]
		r.idle[s.Name] = list[:len(list)-1]
		if !ended(c) {
			return c
		}
		c.Close()
	}
	return nil
}

func (r *Run) put(s Stream, c *conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.idle[s.Name] = append(r.idle[s.Name], c)
}

// ended looks without waiting whether an idle connection was closed, as every
// client does before it uses one again.
func ended(c *conn) bool {
	sc, ok := c.Conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	err = raw.Read(func(fd uintptr) bool {
		var b [1]byte
		n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		gone = n > 0 || !errors.Is(err, syscall.EAGAIN)
		return true
	})
	return gone || err != nil
}
