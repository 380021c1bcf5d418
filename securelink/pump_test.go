package securelink

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// pair returns the two ends of a loopback connection.
func pair(t testing.TB) (a, b *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	done := make(chan *net.TCPConn, 1)
	go func() {
		c, err := ln.Accept()
		if err == nil {
			done <- c.(*net.TCPConn)
		}
	}()
	c, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	a, b = c.(*net.TCPConn), <-done
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	return a, b
}

// joined returns the outer ends of two connections that are joined.
func joined(t testing.TB) (a, b *net.TCPConn, ends <-chan Ends) {
	a, ai := pair(t)
	b, bi := pair(t)
	out := make(chan Ends, 1)
	var j Joiner
	go func() { out <- j.Join(ai, bi) }()
	return a, b, out
}

// LNK-6: half-close is passed on as half-close, both ways.
func TestJoiner_HalfClose(t *testing.T) {
	a, b, ends := joined(t)
	_, err := a.Write([]byte("ask"))
	require.NoError(t, err)
	require.NoError(t, a.CloseWrite())
	got, err := io.ReadAll(b)
	require.NoError(t, err)
	require.Equal(t, "ask", string(got))
	_, err = b.Write([]byte("answer"))
	require.NoError(t, err)
	require.NoError(t, b.CloseWrite())
	got, err = io.ReadAll(a)
	require.NoError(t, err)
	require.Equal(t, "answer", string(got))
	require.Equal(t, Ends{}, <-ends)
}

// LNK-6: a reset is passed on as a reset, both ways.
func TestJoiner_Reset(t *testing.T) {
	for _, first := range []bool{true, false} {
		a, b, ends := joined(t)
		if !first {
			a, b = b, a
		}
		Abort(a)
		_, err := b.Read(make([]byte, 1))
		require.ErrorIs(t, err, syscall.ECONNRESET)
		e := <-ends
		require.Error(t, errors.Join(e.FromA, e.FromB))
	}
}

func TestJoiner_Bulk(t *testing.T) {
	a, b, ends := joined(t)
	want := make([]byte, 20<<20)
	_, _ = rand.Read(want)
	// Sizes around the buffer, the pipe and single bytes.
	go func() {
		rest := want
		for _, n := range []int{1, smallRead - 1, smallRead, smallRead + 1, 3, spliceMost, 2*spliceMost + 5} {
			_, _ = a.Write(rest[:n])
			rest = rest[n:]
		}
		_, _ = a.Write(rest)
		_ = a.CloseWrite()
	}()
	got, err := io.ReadAll(b)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
	require.NoError(t, b.CloseWrite())
	require.Equal(t, Ends{}, <-ends)
}

// LNK-9: a reader that pauses stops the writer; nothing piles up in between.
func TestJoiner_BackPressure(t *testing.T) {
	a, b, _ := joined(t)
	_ = a.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
	n, err := io.Copy(a, io.LimitReader(zeros{}, 1<<30))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.Less(t, n, int64(64<<20))
	// It flows again.
	go func() { _, _ = io.Copy(io.Discard, b) }()
	_ = a.SetWriteDeadline(time.Now().Add(10 * time.Second))
	_, err = io.Copy(a, io.LimitReader(zeros{}, 64<<20))
	require.NoError(t, err)
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }
