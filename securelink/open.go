package securelink

import (
	"encoding/binary"
	"fmt"

	"github.com/opfield/availability/placement"
)

// MaxFirst bounds the first bytes of a stream that travel with its OPEN.
const MaxFirst = 32 << 10

// Open asks for a stream. First are the stream's first bytes: nginx sends its
// ClientHello without waiting, so the link costs no round trip of its own.
type Open struct {
	Link  placement.LinkID
	Epoch uint64
	First []byte
}

// Encode appends the frame to b.
func (o Open) Encode(b []byte) []byte {
	body := appendText(make([]byte, 0, 160+len(o.First)), o.Link.String())
	body = binary.BigEndian.AppendUint64(body, o.Epoch)
	return AppendFrame(b, FrameOpen, append(body, o.First...))
}

// DecodeOpen decodes the body of a FrameOpen. First aliases body.
func DecodeOpen(body []byte) (Open, error) {
	d := decoder{b: body}
	link := d.text()
	o := Open{Epoch: d.u64()}
	o.First = d.rest()
	if err := d.done(); err != nil {
		return Open{}, err
	}
	if len(o.First) > MaxFirst {
		return Open{}, fmt.Errorf("%w: %d first bytes, at most %d are allowed", ErrFrame, len(o.First), MaxFirst)
	}
	id, err := placement.ParseLinkID(link)
	if err != nil {
		return Open{}, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	o.Link = id
	return o, nil
}
