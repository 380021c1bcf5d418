package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/opfield/availability/bus"
	"github.com/opfield/availability/placement"
)

const (
	maxEventLine = 64 << 10
	followAgain  = time.Second
)

type eventsCmd struct {
	Follow bool `short:"f" help:"Go on with every change; a lost controller is waited for."`
}

func (c *eventsCmd) Run(s *session) error {
	path := "/v1/events"
	if c.Follow {
		path += "?follow=true"
	}
	for first := true; ; first = false {
		err := c.stream(s, path)
		switch {
		case s.ctx.Err() != nil:
			return nil
		case !c.Follow, first && err != nil && !errors.Is(err, errCut):
			return err
		}
		s.say("the controller is away (%v); trying again", err)
		select {
		case <-s.ctx.Done():
			return nil
		case <-time.After(followAgain):
		}
	}
}

// errCut is the end of a stream that should go on.
var errCut = errors.New("the stream ended")

func (c *eventsCmd) stream(s *session, path string) error {
	resp, err := s.client.open(s.ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxEventLine)
	for lines.Scan() {
		if err := c.print(s, lines.Bytes()); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%w: %w", errCut, err)
	}
	if c.Follow {
		return errCut
	}
	return nil
}

func (c *eventsCmd) print(s *session, line []byte) error {
	if s.json {
		_, err := s.out.Write(append(line, '\n'))
		return err
	}
	var env struct {
		Type string    `json:"type"`
		Time time.Time `json:"time"`
	}
	if err := json.Unmarshal(line, &env); err != nil {
		return fmt.Errorf("read event: %w", err)
	}
	if env.Type == placement.EventType {
		e, err := placement.UnmarshalEvent(line)
		if err != nil {
			return fmt.Errorf("read event: %w", err)
		}
		return printEvent(s.out, env.Time, "placement "+e.Placement, placementState(e), e.Reason)
	}
	e, err := bus.UnmarshalNodeEvent(line)
	if err != nil {
		return fmt.Errorf("read event: %w", err)
	}
	return printEvent(s.out, env.Time, "node "+e.Node, string(e.State), e.Reason)
}

func printEvent(w io.Writer, at time.Time, what, state, reason string) error {
	line := fmt.Sprintf("%s  %-40s  %-12s  %s", when(at), printable(what), printable(state), strings.TrimPrefix(printable(reason), "-"))
	_, err := fmt.Fprintln(w, strings.TrimRight(line, " "))
	return err
}
