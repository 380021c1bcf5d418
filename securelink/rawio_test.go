package securelink

import (
	"errors"
	"io"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func pooledSocket(t *testing.T, size int) (far interface {
	io.Writer
	CloseWrite() error
}, s *Socket, pool *sync.Pool) {
	a, b := pair(t)
	s, err := NewSocket(b)
	require.NoError(t, err)
	return a, s, &sync.Pool{New: func() any { b := make([]byte, size); return &b }}
}

// The end of a stream comes with the last bytes, or after them when they fill
// the buffer.
func TestSocket_EndBehindBytes(t *testing.T) {
	for _, size := range []int{3, 100} {
		far, s, pool := pooledSocket(t, size)
		_, err := far.Write([]byte("abc"))
		require.NoError(t, err)
		require.NoError(t, far.CloseWrite())
		var got []byte
		for err == nil {
			var buf *[]byte
			var n int
			buf, n, err = s.ReadPooled(pool)
			got = append(got, (*buf)[:n]...)
		}
		require.ErrorIs(t, err, io.EOF)
		require.Equal(t, "abc", string(got))
	}
}

// LNK-6: the kernel tells of a reset only once; found behind bytes, it is not
// taken for a clean end.
func TestSocket_ResetBehindBytes(t *testing.T) {
	a, b := pair(t)
	s, err := NewSocket(b)
	require.NoError(t, err)
	pool := &sync.Pool{New: func() any { b := make([]byte, 100); return &b }}
	_, err = a.Write([]byte("abc"))
	require.NoError(t, err)
	Abort(a)
	for err == nil {
		_, _, err = s.ReadPooled(pool)
	}
	require.ErrorIs(t, err, syscall.ECONNRESET)
	require.False(t, errors.Is(err, io.EOF))
}

// A writer that must wait goes on when there is room, and loses nothing.
func TestSocket_WaitsForRoom(t *testing.T) {
	a, b := pair(t)
	s, err := NewSocket(b)
	require.NoError(t, err)
	const size = 32 << 20
	done := make(chan error, 1)
	go func() {
		_, err := s.Write(make([]byte, size))
		done <- errors.Join(err, s.CloseWrite())
	}()
	n, err := io.Copy(io.Discard, a)
	require.NoError(t, err)
	require.NoError(t, <-done)
	require.EqualValues(t, size, n)
}
