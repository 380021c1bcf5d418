package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/opfield/availability/api"
)

const (
	maxAnswer   = 256 << 20 // 5,000 routes and 10,000 links fit many times
	readyWithin = 5 * time.Second
	readyAgain  = 250 * time.Millisecond
)

// client talks to the controller over its socket.
type client struct {
	socket string
	http   *http.Client
	talk   io.Writer // for people
}

func newClient(socket string, talk io.Writer) *client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}
	return &client{socket: socket, talk: talk, http: &http.Client{Transport: &http.Transport{DialContext: dial}}}
}

// call sends body as JSON and decodes the answer into out, if not nil.
func (c *client) call(ctx context.Context, method, path string, body, out any) error {
	resp, err := c.open(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return decodeAnswer(resp, out)
}

func decodeAnswer(resp *http.Response, out any) error {
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(out); err != nil {
		return fmt.Errorf("read the controller's answer: %w", err)
	}
	return nil
}

// poll waits on the server for a version of the document other than have. It
// returns the version it got; the same one means that nothing changed in time.
func (c *client) poll(ctx context.Context, path, have string, out any) (string, error) {
	resp, err := c.send(ctx, http.MethodGet, path, nil, have)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNotModified {
		return have, nil
	}
	return resp.Header.Get("ETag"), decodeAnswer(resp, out)
}

// open returns a successful answer; a problem document is an *api.Problem. A
// controller that has just started is asked again for a while: it did nothing.
func (c *client) open(ctx context.Context, method, path string, body any) (*http.Response, error) {
	begin := time.Now()
	for told := false; ; told = true {
		resp, err := c.send(ctx, method, path, body, "")
		if p, ok := errors.AsType[*api.Problem](err); !ok || p.Code != api.CodeNotReady || time.Since(begin) >= readyWithin {
			return resp, err
		}
		if !told {
			fmt.Fprintln(c.talk, "the controller does not decide about policies yet; trying again")
		}
		select {
		case <-time.After(readyAgain):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// errAway is a controller that cannot be reached.
var errAway = errors.New("controller not reached")

func (c *client) send(ctx context.Context, method, path string, body any, have string) (*http.Response, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://opfield"+path, r)
	if err != nil {
		return nil, err
	}
	if have != "" {
		req.Header.Set("If-None-Match", have)
	}
	resp, err := c.http.Do(req)
	if ue, ok := errors.AsType[*url.Error](err); ok {
		return nil, fmt.Errorf("%w at %s: %w; run this as root on the controller's host, with `opfield serve` running", errAway, c.socket, ue.Err)
	}
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 == 2 || resp.StatusCode == http.StatusNotModified {
		return resp, nil
	}
	defer resp.Body.Close()
	var p api.Problem
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&p); err != nil || p.Detail == "" {
		return nil, fmt.Errorf("the controller answered %s", resp.Status)
	}
	return nil, &p
}

// printError names every field that is wrong.
func printError(w io.Writer, err error) {
	p, ok := errors.AsType[*api.Problem](err)
	if !ok || len(p.Errors) == 0 {
		fmt.Fprintln(w, "opfield:", err)
		if ok && p.Eligibility != nil {
			printNotices(w, "BLOCKED", p.Eligibility.Blockers)
			fmt.Fprintln(w, "`opfield ha check` with the same flags shows every node")
		}
		return
	}
	for _, v := range p.Errors {
		fmt.Fprintf(w, "opfield: %s: %s (%s)\n", v.Field, v.Message, v.Code)
	}
}

func (s *session) printJSON(v any) error {
	e := json.NewEncoder(s.out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// terminal reports whether a person looks at the output.
func (s *session) terminal() bool { return isTerminal(s.out) }

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// say talks to the person, not to a program.
func (s *session) say(format string, args ...any) { fmt.Fprintf(s.talk, format+"\n", args...) }

// table prints rows with aligned columns; the first row is the heading.
func table(w io.Writer, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			if i > 0 {
				fmt.Fprint(t, "\t")
			}
			fmt.Fprint(t, printable(cell))
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

// printable keeps foreign texts from moving the cursor or breaking columns.
func printable(s string) string {
	if s == "" {
		return "-"
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
}
