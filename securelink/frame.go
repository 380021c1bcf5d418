package securelink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// MaxFrame bounds the body of a frame in bytes. A larger length ends the
// connection before anything is allocated.
const MaxFrame = 64 << 10

// ErrFrame is the cause of every error about malformed bytes from a peer.
var ErrFrame = errors.New("malformed frame")

// FrameType says what a frame's body is. Unknown types are skipped.
type FrameType uint8

// A frame is a 4-byte big-endian length of the body, one type byte, the body.
const frameHeader = 5

// AppendFrame appends one frame to b. It panics on a body above MaxFrame,
// which only a bug in our own code can produce.
func AppendFrame(b []byte, t FrameType, body []byte) []byte {
	if len(body) > MaxFrame {
		panic("securelink: frame body above MaxFrame")
	}
	b = binary.BigEndian.AppendUint32(b, uint32(len(body)))
	b = append(b, byte(t))
	return append(b, body...)
}

// ReadFrame reads one frame. The body is valid until the next call with the
// same buf, which is grown as needed up to MaxFrame.
func ReadFrame(r io.Reader, buf []byte) (FrameType, []byte, error) {
	if cap(buf) < frameHeader {
		buf = make([]byte, frameHeader, 512)
	}
	head := buf[:frameHeader]
	if _, err := io.ReadFull(r, head); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head)
	t := FrameType(head[4])
	if n > MaxFrame {
		return 0, nil, fmt.Errorf("%w: length %d, at most %d is allowed", ErrFrame, n, MaxFrame)
	}
	if uint32(cap(buf)) < n {
		buf = make([]byte, n)
	}
	body := buf[:n]
	if _, err := io.ReadFull(r, body); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	return t, body, nil
}

// decoder reads the fields of a frame body. After the last field, done must
// be called: it reports a short or overlong body.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) take(n int) []byte {
	if d.bad || len(d.b) < n {
		d.bad = true
		return nil
	}
	v := d.b[:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) u8() uint8 {
	if v := d.take(1); v != nil {
		return v[0]
	}
	return 0
}

func (d *decoder) u16() uint16 {
	if v := d.take(2); v != nil {
		return binary.BigEndian.Uint16(v)
	}
	return 0
}

func (d *decoder) u64() uint64 {
	if v := d.take(8); v != nil {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

// text reads a string with a 2-byte length.
func (d *decoder) text() string { return string(d.take(int(d.u16()))) }

func (d *decoder) rest() []byte {
	v := d.b
	d.b = nil
	return v
}

func (d *decoder) done() error {
	if d.bad {
		return fmt.Errorf("%w: body too short", ErrFrame)
	}
	if len(d.b) > 0 {
		return fmt.Errorf("%w: %d bytes too many", ErrFrame, len(d.b))
	}
	return nil
}

func appendText(b []byte, s string) []byte {
	if len(s) > 0xffff {
		s = s[:0xffff]
	}
	b = binary.BigEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}
