package guard

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// junk is what follows a cut: longer than any TLS record and not one.
const junk = 17 << 10

// endWithin bounds the wait for nginx to take it. nginx reads on as fast as
// its client does; a client that pauses longer than nginx's own send_timeout
// is dropped by nginx itself.
const endWithin = 2 * time.Minute

// Serve is the guard process: it holds what it is told over the socket fd,
// and ends what is left when the sidecar is gone.
func Serve(fd uintptr) error {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	f := os.NewFile(fd, "guard")
	c, err := net.FileConn(f)
	_ = f.Close()
	if err != nil {
		return fmt.Errorf("guard socket: %w", err)
	}
	sock, ok := c.(*net.UnixConn)
	if !ok {
		return errors.New("guard socket: want a unix socket")
	}
	held := map[uint64]int{}
	msg := make([]byte, messageSize+dropSize*dropsMost)
	oob := make([]byte, unix.CmsgSpace(4))
	for {
		n, oobn, _, _, err := sock.ReadMsgUnix(msg, oob)
		if err != nil || n == 0 {
			if err != nil && !errors.Is(err, io.EOF) {
				err = fmt.Errorf("read guard socket: %w", err)
			} else {
				err = nil
			}
			end(held)
			return err
		}
		if n < messageSize {
			continue
		}
		drop := func(id uint64) {
			if got, ok := held[id]; ok {
				_ = unix.Close(got)
				delete(held, id)
			}
		}
		id := binary.BigEndian.Uint64(msg[1:])
		switch msg[0] {
		case opHold:
			if got := received(oob[:oobn]); got >= 0 {
				held[id] = got
			}
		case opDrop:
			drop(id)
		}
		for rest := msg[messageSize:n]; len(rest) >= dropSize; rest = rest[dropSize:] {
			drop(binary.BigEndian.Uint64(rest))
		}
	}
}

// received takes the descriptor out of a message, or returns -1.
func received(oob []byte) int {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(msgs) != 1 {
		return -1
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return -1
	}
	unix.CloseOnExec(fds[0])
	return fds[0]
}

// end writes junk to every connection and ends it.
func end(held map[uint64]int) {
	var wg sync.WaitGroup
	for _, fd := range held {
		wg.Go(func() {
			f := os.NewFile(uintptr(fd), "nginx")
			c, err := net.FileConn(f)
			_ = f.Close()
			if err != nil {
				return
			}
			_ = c.SetWriteDeadline(time.Now().Add(endWithin))
			_, _ = c.Write(make([]byte, junk))
			_ = c.Close()
		})
	}
	wg.Wait()
}
