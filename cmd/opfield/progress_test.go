package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/opfield/availability/placement"
	"github.com/opfield/availability/policy"
)

// code waits for the exit code of a command.
func code(t *testing.T, done chan int) int {
	t.Helper()
	select {
	case c := <-done:
		done <- c // also for the clean-up
		return c
	case <-time.After(soon):
		t.Fatal("the command did not end")
		return 0
	}
}

// step changes the operation at work, then waits until it is shown.
func (f *fleet) step(out *syncBuffer, shown string, change func(*policy.View, *policy.Operation)) {
	f.t.Helper()
	f.policies.Work("web", change)
	until(f.t, out, shown)
}

func TestProgress_Text(t *testing.T) { // API-3, OPS-3
	f := newFleet(t)
	out, talk, done := f.start(t.Context(), "ha", "enable", "web", "--node", "n1", "--container", "web-1", "--mode", "failover", "--wait")
	until(t, out, "web-1 enable pending")
	f.step(out, "selecting nodes", func(_ *policy.View, op *policy.Operation) {
		op.Status, op.Phase, op.StartedAt = policy.Running, policy.SelectingNodes, op.CreatedAt
	})
	f.policies.Work("web", func(_ *policy.View, op *policy.Operation) { op.Worked += time.Second }) // nothing for people
	f.step(out, "n2: serving", func(v *policy.View, op *policy.Operation) {
		op.Phase, op.Progress, op.Note = policy.PreparingImages, 50, "waits for the image on n2"
		v.Placements = append(v.Placements, policy.PlacementView{Node: "n2", Want: placement.WantServing, Generation: 1, State: placement.StateRemoved})
	})
	f.step(out, "attempt 2", func(_ *policy.View, op *policy.Operation) {
		op.Status, op.Attempts, op.Note = policy.Waiting, 1, ""
		op.Code, op.Message, op.Next = "AVAILABILITY_IMAGE_PULL", "no such\x1b[31m image", time.Now().Add(time.Hour)
	})
	f.step(out, "n2: removed", func(v *policy.View, op *policy.Operation) { v.Placements = v.Placements[:1] })
	f.step(out, "failed", func(_ *policy.View, op *policy.Operation) {
		op.Status, op.FinishedAt = policy.Failed, op.CreatedAt.Add(63*time.Second)
	})
	require.Equal(t, exitFailed, code(t, done))
	require.Contains(t, talk.String(), "operation web-1 failed: no such [31m image (AVAILABILITY_IMAGE_PULL); when the cause is mended, `opfield ha retry web web-1`")
	golden(t, "progress", out.String())
	require.NotContains(t, out.String(), "\x1b")
}

func TestProgress_JSON(t *testing.T) { // API-3
	f := newFleet(t)
	f.enabled()
	f.must("ha", "stop", "web")
	f.policies.Work("web", func(_ *policy.View, op *policy.Operation) { op.Status = policy.Running })
	out, talk, done := f.start(t.Context(), "--json", "ha", "operations", "web", "web-2", "--follow")
	until(t, out, `"pending"`) // behind the enable
	f.policies.Work("web", func(_ *policy.View, op *policy.Operation) { op.Seen = time.Now() })
	f.step(out, `"queued"`, func(_ *policy.View, op *policy.Operation) { op.Status = policy.Completed })
	f.step(out, `"stopping"`, func(v *policy.View, op *policy.Operation) { op.Status, op.Phase = policy.Running, policy.Stopping })
	f.step(out, `"completed"`, func(v *policy.View, op *policy.Operation) { op.Status, v.Health = policy.Completed, policy.Stopped })
	require.Zero(t, code(t, done), talk.String())
	var states []string
	d := json.NewDecoder(strings.NewReader(out.String()))
	for d.More() {
		var p progress
		require.NoError(t, d.Decode(&p))
		require.Equal(t, "web-2", p.Operation.ID)
		states = append(states, string(p.Operation.Status))
	}
	require.Equal(t, []string{"pending", "running", "completed"}, states)
}

// A policy that was given up is gone with its operations: that is the end that
// was asked for.
func TestProgress_Disable(t *testing.T) { // DIS-1
	f := newFleet(t)
	f.enabled()
	f.policies.Work("web", func(_ *policy.View, op *policy.Operation) { op.Status = policy.Completed })
	out, talk, done := f.start(t.Context(), "ha", "disable", "web", "--survivor", "n1", "--confirm", "web", "--wait")
	until(t, out, "disable pending")
	f.policies.Work("web", func(_ *policy.View, op *policy.Operation) { op.Status = policy.Completed })
	require.Zero(t, code(t, done), talk.String())
	require.Contains(t, out.String(), "web-2 disable completed")
}

func TestProgress_CleanupPending(t *testing.T) { // OPS-3
	f := newFleet(t)
	f.enabled()
	out, talk, done := f.start(t.Context(), "ha", "operations", "web", "--follow")
	until(t, out, "pending")
	f.policies.Work("web", func(_ *policy.View, op *policy.Operation) {
		op.Status, op.Result = policy.CleanupPending, "n3 is away and has a stopped copy"
	})
	require.Zero(t, code(t, done), talk.String())
	require.Contains(t, out.String(), "n3 is away")
}

// An interruption ends the view, not the operation.
func TestProgress_Interrupted(t *testing.T) { // API-3
	f := newFleet(t)
	ctx, interrupt := context.WithCancel(t.Context())
	out, talk, done := f.start(ctx, "ha", "enable", "web", "--node", "n1", "--container", "web-1", "--mode", "failover", "--wait")
	until(t, out, "pending")
	interrupt()
	require.Equal(t, exitFailed, code(t, done))
	require.Contains(t, talk.String(), "operation web-1 goes on, look again with `opfield ha operations web web-1 --follow`")
	require.Equal(t, policy.Pending, f.view().Operation.Status)
}

func TestProgress_Terminal(t *testing.T) { // API-3
	f := newFleet(t)
	f.enabled()
	screen, program := terminal(t)
	require.NoError(t, unix.IoctlSetWinsize(int(program.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: 60, Row: 20}))
	done := make(chan error, 1)
	go func() {
		s := &session{ctx: t.Context(), client: newClient(f.server.Socket, io.Discard), out: program, talk: io.Discard}
		done <- s.follow("web", *f.view().Operation)
	}()
	var seen strings.Builder
	b := make([]byte, 4096)
	until := func(text string) {
		for !strings.Contains(seen.String(), text) {
			n, err := screen.Read(b)
			require.NoError(t, err)
			seen.Write(b[:n])
		}
	}
	until("[queued]")
	f.policies.Work("web", func(v *policy.View, op *policy.Operation) {
		op.Status, op.Phase, op.Progress = policy.Running, policy.CheckingHealth, 50
		v.Placements[0].Reason = strings.Repeat("long ", 40)
	})
	until("[checking health]")
	until("[###############...............] 50 %")
	f.policies.Work("web", func(_ *policy.View, op *policy.Operation) { op.Status, op.Progress = policy.Completed, 100 })
	until("100 %")
	require.NoError(t, <-done)
	require.Regexp(t, `\x1b\[\d+A\r`, seen.String(), "drawn over the last one")
	for _, line := range strings.Split(seen.String(), "\n") {
		for _, control := range []string{restOfLine, restOfAll, "\r"} {
			line = strings.ReplaceAll(line, control, "")
		}
		if i := strings.Index(line, "A"); strings.HasPrefix(line, "\x1b[") {
			line = line[i+1:]
		}
		require.Less(t, len(line), 60, line)
	}
}

func TestProgress_Lines(t *testing.T) { // API-3
	at := time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	p := progress{
		Operation: policy.Operation{
			ID: "web-4", Type: policy.Rollout, Status: policy.Waiting, Phase: policy.Starting, Progress: 33, Attempts: 2, RolledBack: true,
			Code: "AVAILABILITY_NOT_READY", Message: "port 8080 refuses", CreatedAt: at, Next: at.Add(75 * time.Second),
		},
		Placements: []policy.PlacementView{
			{Node: "n1", Want: placement.WantDraining, State: placement.StateRunning, Ready: true, Generation: 1, Streams: 12},
			{Node: "n2", Want: placement.WantServing, State: placement.StateRunning, Generation: 2, Reason: "ポート8080は接続を拒否しています"},
			{Node: "n3", Want: placement.WantPrepared, State: placement.StateRemoved, ImageReady: true, Generation: 2},
		},
	}
	var b bytes.Buffer
	for _, width := range []int{72, 40} {
		for _, line := range p.lines(at.Add(63*time.Second), width) {
			require.LessOrEqual(t, columns(line), width)
			b.WriteString(line + "\n")
		}
		b.WriteString("\n")
	}
	golden(t, "picture", b.String())
	require.Contains(t, b.String(), "attempt 3 in 12s")
}

// A controller that restarts is waited for.
func TestProgress_ControllerAway(t *testing.T) { // API-3
	f := newFleet(t)
	f.enabled()
	s := &session{ctx: t.Context(), client: newClient(f.server.Socket, io.Discard), out: &syncBuffer{}, talk: &syncBuffer{}}
	op := *f.view().Operation
	away := f.server.Socket + ".away"
	require.NoError(t, os.Rename(f.server.Socket, away))
	s.client.http.CloseIdleConnections()
	done := make(chan error, 1)
	go func() { done <- s.follow("web", op) }()
	until(t, s.talk.(*syncBuffer), "the controller is away")
	require.NoError(t, os.Rename(away, f.server.Socket))
	until(t, s.out.(*syncBuffer), "pending")
	f.policies.Work("web", func(_ *policy.View, op *policy.Operation) { op.Status = policy.Completed })
	require.NoError(t, <-done)
}
