package securelink

import (
	"errors"
	"io"
	"net"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// smallRead is the buffer for messages: what fits goes through one read
	// and one write and needs no pipe.
	smallRead = 16 << 10
	// spliceMost is what one splice call may move; it also sizes the pipe.
	spliceMost = 256 << 10
)

// Joiner joins pairs of TCP connections. An idle stream holds no buffer and
// no pipe: both are borrowed for as long as bytes are at hand.
type Joiner struct {
	buffers sync.Pool
	pipes   sync.Pool
}

// pipe is a kernel pipe that is empty whenever it is in the pool.
type pipe struct {
	r, w    int
	cleanup runtime.Cleanup // closes the descriptors of a pipe its pool let go of
}

// Ends says how the two directions of a joined stream ended: nil means a
// clean end of stream.
type Ends struct {
	FromA, FromB error
}

// Join copies between a and b until both directions have ended, then closes
// both. An end of stream is passed on as half-close, a reset as a reset.
// Bytes that were read beforehand must have been written by the caller.
func (j *Joiner) Join(a, b *net.TCPConn) Ends {
	var ends Ends
	var wg sync.WaitGroup
	wg.Go(func() { ends.FromB = j.direction(a, b, b) })
	ends.FromA = j.direction(b, a, a)
	wg.Wait()
	_ = a.Close()
	_ = b.Close()
	return ends
}

// direction copies src to dst and passes its end on.
func (j *Joiner) direction(dst, src, from *net.TCPConn) error {
	err := j.Copy(dst, src)
	if err == nil {
		// A failed half-close means that the other side has gone already.
		_ = dst.CloseWrite()
		return nil
	}
	Abort(dst)
	Abort(from)
	return err
}

// Copy moves bytes from src to dst until src ends. Messages go through a
// small buffer; when a read fills it, the bulk behind it is spliced in the
// kernel (splice(2)) until the source runs dry.
func (j *Joiner) Copy(dst, src *net.TCPConn) error {
	in, err := src.SyscallConn()
	if err != nil {
		return err
	}
	out, err := dst.SyscallConn()
	if err != nil {
		return err
	}
	var end error
	w := newRawWriter(out)
	waitErr := in.Read(func(fd uintptr) bool {
		end = j.drain(w, int(fd))
		return end != nil
	})
	if errors.Is(end, io.EOF) {
		return nil
	}
	return errors.Join(end, waitErr)
}

// drain moves what is readable. It returns nil when the source would block.
func (j *Joiner) drain(w *rawWriter, fd int) error {
	buf := j.buffer()
	defer j.buffers.Put(buf)
	for {
		n, err := rawRead(fd, *buf)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil:
			return err
		case n == 0:
			return io.EOF
		}
		if err := w.write((*buf)[:n]); err != nil {
			return err
		}
		if n < len(*buf) {
			// Not "return nil": the end of the stream may have come with
			// these bytes, and the poller tells of both only once.
			continue
		}
		if err := j.splice(w, fd); err != nil {
			return err
		}
	}
}

// splice moves bulk through a pipe until the source would block or ends (nil:
// the caller's next read tells which).
func (j *Joiner) splice(w *rawWriter, fd int) error {
	p, err := j.pipe()
	if err != nil {
		return nil // out of descriptors: the caller goes on by copying
	}
	for {
		n, err := rawSplice(fd, p.w, spliceMost)
		if err != nil || n == 0 {
			j.pipes.Put(p)
			if errors.Is(err, unix.EAGAIN) || err == nil {
				return nil
			}
			return err
		}
		if err := w.empty(p, n); err != nil {
			p.close() // it still holds bytes
			return err
		}
		if n < smallRead {
			j.pipes.Put(p)
			return nil
		}
	}
}

func (p *pipe) close() {
	p.cleanup.Stop()
	closePair([2]int{p.r, p.w})
}

func closePair(fds [2]int) {
	_ = unix.Close(fds[0])
	_ = unix.Close(fds[1])
}

func (j *Joiner) buffer() *[]byte {
	if b, ok := j.buffers.Get().(*[]byte); ok {
		return b
	}
	b := make([]byte, smallRead)
	return &b
}

func (j *Joiner) pipe() (*pipe, error) {
	if p, ok := j.pipes.Get().(*pipe); ok {
		return p, nil
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, spliceMost)
	p := &pipe{r: fds[0], w: fds[1]}
	p.cleanup = runtime.AddCleanup(p, closePair, fds)
	return p, nil
}
