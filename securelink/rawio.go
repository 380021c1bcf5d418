package securelink

import (
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The system calls of this file never block, so the scheduler need not hear of
// them. Telling it costs more than the call: in a process that was idle it
// wakes the runtime's monitor thread for every message.

func rawRead(fd int, b []byte) (int, error) {
	n, err := rawCall(unix.SYS_READ, fd, unsafe.Pointer(unsafe.SliceData(b)), len(b), 0, 0)
	runtime.KeepAlive(b)
	return n, err
}

func rawWrite(fd int, b []byte) (int, error) {
	n, err := rawCall(unix.SYS_WRITE, fd, unsafe.Pointer(unsafe.SliceData(b)), len(b), 0, 0)
	runtime.KeepAlive(b)
	return n, err
}

// rawSplice moves up to n bytes: splice(from, nil, to, nil, n, flags).
func rawSplice(from, to, n int) (int, error) {
	return rawCall(unix.SYS_SPLICE, from, nil, to, n, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
}

func rawSetsockopt(fd, level, name int, value int32) error {
	_, _, errno := syscall.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name),
		uintptr(unsafe.Pointer(&value)), unsafe.Sizeof(value), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func rawCall(number uintptr, fd int, p unsafe.Pointer, n, a5, a6 int) (int, error) {
	for {
		got, _, errno := syscall.RawSyscall6(number, uintptr(fd), uintptr(p), uintptr(n), 0, uintptr(a5), uintptr(a6))
		switch errno {
		case 0:
			return int(got), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// rawReader reads what there is and waits when there is nothing. It is for one
// goroutine.
type rawReader struct {
	raw syscall.RawConn
	try func(fd uintptr) bool // made once: one for each call would be garbage
	buf []byte
	n   int
	err error

	// With a pool, the buffer is borrowed for the time of a call.
	pool     *sync.Pool
	borrowed *[]byte
	behind   error // what was found behind the bytes; the kernel tells it only once
}

func newRawReader(raw syscall.RawConn) *rawReader {
	r := &rawReader{raw: raw}
	r.try = func(fd uintptr) bool {
		buf := r.buf
		if r.pool != nil {
			r.borrowed = r.pool.Get().(*[]byte)
			buf = *r.borrowed
		}
		r.n, r.err = rawRead(int(fd), buf)
		if !errors.Is(r.err, unix.EAGAIN) {
			if r.pool != nil && r.err == nil && r.n > 0 && r.n < len(buf) {
				more, err := rawRead(int(fd), buf[r.n:])
				r.n += more
				switch {
				case err == nil && more == 0:
					r.behind = io.EOF
				case err != nil && !errors.Is(err, unix.EAGAIN):
					r.behind = err
				}
			}
			return true
		}
		if r.pool != nil {
			r.pool.Put(r.borrowed)
			r.borrowed = nil
		}
		return false
	}
	return r
}

func (r *rawReader) read(b []byte) (int, error) {
	if len(b) == 0 && r.pool == nil {
		return 0, nil
	}
	r.buf = b
	err := r.raw.Read(r.try)
	r.buf = nil
	if err == nil {
		err = r.err
	}
	switch {
	case err != nil:
		return 0, err
	case r.n == 0:
		return 0, io.EOF
	default:
		return r.n, nil
	}
}

// rawWriter writes all bytes or what a pipe holds. It is for one goroutine.
type rawWriter struct {
	raw  syscall.RawConn
	try  func(fd uintptr) bool
	buf  []byte // to be written; empty: left bytes of pipe
	pipe int
	left int
	err  error
}

func newRawWriter(raw syscall.RawConn) *rawWriter {
	w := &rawWriter{raw: raw}
	w.try = func(fd uintptr) bool {
		for w.err == nil && len(w.buf) > 0 {
			var n int
			n, w.err = rawWrite(int(fd), w.buf)
			w.buf = w.buf[n:]
		}
		for w.err == nil && w.left > 0 {
			var n int
			n, w.err = rawSplice(w.pipe, int(fd), w.left)
			w.left -= n
		}
		if errors.Is(w.err, unix.EAGAIN) {
			w.err = nil
			return false
		}
		return true
	}
	return w
}

func (w *rawWriter) write(b []byte) error {
	w.buf = b
	return w.run()
}

// empty writes n bytes that are in the pipe.
func (w *rawWriter) empty(p *pipe, n int) error {
	w.pipe, w.left = p.r, n
	return w.run()
}

func (w *rawWriter) run() error {
	err := w.raw.Write(w.try)
	if err == nil {
		err = w.err
	}
	w.buf, w.left, w.err = nil, 0, nil
	return err
}

// WriteFull writes a small message like c.Write does, but for less (see above).
func WriteFull(c *net.TCPConn, b []byte) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return newRawWriter(raw).write(b)
}

// Socket reads and writes a TCP connection like the net package, but for less
// (see above). One goroutine may read while another one writes.
type Socket struct {
	*net.TCPConn
	r *rawReader
	w *rawWriter
}

// NewSocket returns a Socket on c.
func NewSocket(c *net.TCPConn) (*Socket, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &Socket{TCPConn: c, r: newRawReader(raw), w: newRawWriter(raw)}, nil
}

// Read implements net.Conn.
func (s *Socket) Read(b []byte) (int, error) { return s.r.read(b) }

// Write implements net.Conn.
func (s *Socket) Write(b []byte) (int, error) {
	if err := s.w.write(b); err != nil {
		return 0, err
	}
	return len(b), nil
}

// ReadPooled is Read into a buffer (a *[]byte) of the pool, which is borrowed
// only when there is something to read. The caller puts it back. If the end of
// the stream is there already, it comes with the bytes: io.EOF or an error.
func (s *Socket) ReadPooled(pool *sync.Pool) (buf *[]byte, n int, err error) {
	s.r.pool = pool
	n, err = s.r.read(nil)
	if err == nil {
		err = s.r.behind
	}
	buf = s.r.borrowed
	s.r.pool, s.r.borrowed = nil, nil
	return buf, n, err
}
