package securelink

import (
	"encoding/binary"
	"fmt"

	"github.com/opfield/availability/placement"
)

// ProtocolVersion is the version this code speaks. It is bound into the
// handshake twice: by the ALPN name of the control connection and by Hello.
//
// History: 1 = first version.
const ProtocolVersion = 1

// ALPN is the TLS application protocol of control connections (RFC 7301).
const ALPN = "opfield-link/1"

// Magic begins a data connection of what the session is for: at an accepting
// end it waits for a stream, at a dialing end it opens one. MagicDial begins
// one with which an accepting end opens a stream itself. A one-time token
// follows.
const (
	Magic     = "OPL1"
	MagicDial = "OPD1"
)

// TokenSize is the length of a token in bytes.
const TokenSize = 16

// Token admits one data connection, once.
type Token [TokenSize]byte

// Control frames. New facts come as new frame types: the body of a known one
// never changes within a protocol version.
const (
	FrameHello      FrameType = 1  // peer → relay, first frame
	FrameWelcome    FrameType = 2  // relay → peer, first frame
	FramePing       FrameType = 3  // both ways
	FramePong       FrameType = 4  // both ways
	FrameRegister   FrameType = 5  // accepting end → relay
	FrameUnregister FrameType = 6  // accepting end → relay
	FrameSynced     FrameType = 7  // both ways: the full list has been sent
	FrameLink       FrameType = 8  // relay → dialing end
	FrameNode       FrameType = 9  // relay → dialing end
	FrameAskTokens  FrameType = 10 // peer → relay
	FrameTokens     FrameType = 11 // relay → peer
	FrameRestarting FrameType = 12 // relay → peer
	FrameRefused    FrameType = 13 // relay → peer, then the connection ends
	FrameWant       FrameType = 14 // relay → accepting end: more pooled connections
)

// Data frames: the only ones on a data connection before its raw bytes.
const (
	FrameOpen   FrameType = 32 // dialing end → relay → accepting end
	FrameOK     FrameType = 33 // accepting end → relay → dialing end
	FrameRefuse FrameType = 34 // relay or accepting end → dialing end
)

// Capabilities a peer announces in Hello.
const (
	CapAccept uint8 = 1 << iota // registers links and takes streams
	CapFollow                   // wants the state of links
)

// Hello is the first frame of a peer.
type Hello struct {
	Version  uint16
	Instance uint64 // of the peer's process; a new one replaces the old session
	Caps     uint8
}

// Encode appends the frame to b.
func (h Hello) Encode(b []byte) []byte {
	body := binary.BigEndian.AppendUint16(nil, h.Version)
	body = binary.BigEndian.AppendUint64(body, h.Instance)
	return AppendFrame(b, FrameHello, append(body, h.Caps))
}

// DecodeHello decodes the body of a FrameHello.
func DecodeHello(body []byte) (Hello, error) {
	d := decoder{b: body}
	h := Hello{Version: d.u16(), Instance: d.u64(), Caps: d.u8()}
	return h, d.done()
}

// Welcome is the first frame of a relay.
type Welcome struct {
	Version  uint16
	Instance uint64 // of the relay's process
	Relay    string // id
	AgeMilli uint64 // how long the relay has been up
}

// Encode appends the frame to b.
func (w Welcome) Encode(b []byte) []byte {
	body := binary.BigEndian.AppendUint16(nil, w.Version)
	body = binary.BigEndian.AppendUint64(body, w.Instance)
	body = appendText(body, w.Relay)
	return AppendFrame(b, FrameWelcome, binary.BigEndian.AppendUint64(body, w.AgeMilli))
}

// DecodeWelcome decodes the body of a FrameWelcome.
func DecodeWelcome(body []byte) (Welcome, error) {
	d := decoder{b: body}
	w := Welcome{Version: d.u16(), Instance: d.u64(), Relay: d.text(), AgeMilli: d.u64()}
	return w, d.done()
}

// Record is what an accepting end says about one of its links.
type Record struct {
	Link     placement.LinkID
	Protocol placement.Protocol
	Kind     placement.Kind
	Role     placement.Role
	State    placement.State
	Ready    bool
	Order    placement.Order
}

// Serves reports whether the link may be opened by this record.
func (r Record) Serves() bool {
	return r.Ready && r.Role == placement.RoleServing && r.State == placement.StateRunning
}

// Report is what a relay says about one link.
type Report struct {
	Record
	Present bool // registered at the relay by a live session
}

func (r Record) appendBody(b []byte, flags uint8) []byte {
	if r.Ready {
		flags |= 1
	}
	b = appendText(b, r.Link.String())
	b = appendText(b, string(r.Protocol))
	b = appendText(b, string(r.Kind))
	b = appendText(b, string(r.Role))
	b = appendText(b, string(r.State))
	b = append(b, flags)
	b = binary.BigEndian.AppendUint64(b, r.Order.Generation)
	b = binary.BigEndian.AppendUint64(b, r.Order.Epoch)
	b = binary.BigEndian.AppendUint64(b, r.Order.Sequence.Incarnation)
	return binary.BigEndian.AppendUint64(b, r.Order.Sequence.Counter)
}

func decodeRecord(body []byte, allowed uint8) (Record, uint8, error) {
	d := decoder{b: body}
	link := d.text()
	r := Record{
		Protocol: placement.Protocol(d.text()),
		Kind:     placement.Kind(d.text()),
		Role:     placement.Role(d.text()),
		State:    placement.State(d.text()),
	}
	flags := d.u8()
	r.Ready = flags&1 != 0
	r.Order = placement.Order{Generation: d.u64(), Epoch: d.u64(),
		Sequence: placement.Sequence{Incarnation: d.u64(), Counter: d.u64()}}
	if err := d.done(); err != nil {
		return Record{}, 0, err
	}
	if flags&^allowed != 0 {
		return Record{}, 0, fmt.Errorf("%w: unknown flags", ErrFrame)
	}
	id, err := placement.ParseLinkID(link)
	if err != nil {
		return Record{}, 0, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	r.Link = id
	return r, flags, nil
}

// EncodeRegister appends a FrameRegister to b.
func (r Record) EncodeRegister(b []byte) []byte {
	return AppendFrame(b, FrameRegister, r.appendBody(nil, 0))
}

// DecodeRegister decodes the body of a FrameRegister.
func DecodeRegister(body []byte) (Record, error) {
	r, _, err := decodeRecord(body, 1)
	return r, err
}

// Encode appends a FrameLink to b.
func (r Report) Encode(b []byte) []byte {
	var flags uint8
	if r.Present {
		flags = 2
	}
	return AppendFrame(b, FrameLink, r.appendBody(nil, flags))
}

// DecodeReport decodes the body of a FrameLink.
func DecodeReport(body []byte) (Report, error) {
	r, flags, err := decodeRecord(body, 3)
	return Report{Record: r, Present: flags&2 != 0}, err
}

// EncodeUnregister appends a FrameUnregister to b.
func EncodeUnregister(b []byte, id placement.LinkID) []byte {
	return AppendFrame(b, FrameUnregister, appendText(nil, id.String()))
}

// DecodeUnregister decodes the body of a FrameUnregister.
func DecodeUnregister(body []byte) (placement.LinkID, error) {
	d := decoder{b: body}
	s := d.text()
	if err := d.done(); err != nil {
		return placement.LinkID{}, err
	}
	id, err := placement.ParseLinkID(s)
	if err != nil {
		return placement.LinkID{}, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	return id, nil
}

// NodeSession tells a dialing end whether a node has a session at the relay.
type NodeSession struct {
	Node    string
	Present bool
}

// Encode appends the frame to b.
func (n NodeSession) Encode(b []byte) []byte {
	body := appendText(nil, n.Node)
	if n.Present {
		return AppendFrame(b, FrameNode, append(body, 1))
	}
	return AppendFrame(b, FrameNode, append(body, 0))
}

// DecodeNodeSession decodes the body of a FrameNode.
func DecodeNodeSession(body []byte) (NodeSession, error) {
	d := decoder{b: body}
	n := NodeSession{Node: d.text()}
	flag := d.u8()
	if err := d.done(); err != nil {
		return NodeSession{}, err
	}
	if flag > 1 {
		return NodeSession{}, fmt.Errorf("%w: unknown flags", ErrFrame)
	}
	if err := placement.CheckName(n.Node); err != nil {
		return NodeSession{}, fmt.Errorf("%w: node: %w", ErrFrame, err)
	}
	n.Present = flag == 1
	return n, nil
}

// EncodeNumber appends a frame whose body is one number: ping and pong (a
// nonce), ask-tokens and want (a count), restarting (milliseconds).
func EncodeNumber(b []byte, t FrameType, v uint64) []byte {
	return AppendFrame(b, t, binary.BigEndian.AppendUint64(nil, v))
}

// DecodeNumber decodes the body of a frame made by EncodeNumber.
func DecodeNumber(body []byte) (uint64, error) {
	d := decoder{b: body}
	v := d.u64()
	return v, d.done()
}

// EncodeTokens appends a FrameTokens to b.
func EncodeTokens(b []byte, tokens []Token) []byte {
	var body []byte
	for _, t := range tokens {
		body = append(body, t[:]...)
	}
	return AppendFrame(b, FrameTokens, body)
}

// DecodeTokens decodes the body of a FrameTokens.
func DecodeTokens(body []byte) ([]Token, error) {
	if len(body)%TokenSize != 0 {
		return nil, fmt.Errorf("%w: half a token", ErrFrame)
	}
	tokens := make([]Token, 0, len(body)/TokenSize)
	for ; len(body) > 0; body = body[TokenSize:] {
		tokens = append(tokens, Token(body[:TokenSize]))
	}
	return tokens, nil
}
