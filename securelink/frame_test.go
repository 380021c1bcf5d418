package securelink

import (
	"bytes"
	"encoding/binary"
	"io"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/placement"
)

func TestReadFrame_RefusesLengthBeforeAllocating(t *testing.T) {
	head := binary.BigEndian.AppendUint32(nil, 0xffff_ffff)
	head = append(head, byte(FrameHello))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 100 {
		_, _, err := ReadFrame(bytes.NewReader(head), nil)
		require.ErrorIs(t, err, ErrFrame)
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(1<<20))
}

func TestReadFrame_HalfFrame(t *testing.T) {
	whole := Hello{Version: 1, Instance: 7, Caps: CapFollow}.Encode(nil)
	for n := 1; n < len(whole); n++ {
		_, _, err := ReadFrame(bytes.NewReader(whole[:n]), nil)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF, "%d bytes", n)
	}
	ft, body, err := ReadFrame(bytes.NewReader(whole), nil)
	require.NoError(t, err)
	require.Equal(t, FrameHello, ft)
	h, err := DecodeHello(body)
	require.NoError(t, err)
	require.Equal(t, Hello{Version: 1, Instance: 7, Caps: CapFollow}, h)
}

// reencode decodes body as a frame of type t and encodes it again.
func reencode(t FrameType, body []byte) ([]byte, error) {
	switch t {
	case FrameHello:
		v, err := DecodeHello(body)
		return v.Encode(nil), err
	case FrameWelcome:
		v, err := DecodeWelcome(body)
		return v.Encode(nil), err
	case FrameRegister:
		v, err := DecodeRegister(body)
		return v.EncodeRegister(nil), err
	case FrameLink:
		v, err := DecodeReport(body)
		return v.Encode(nil), err
	case FrameUnregister:
		v, err := DecodeUnregister(body)
		return EncodeUnregister(nil, v), err
	case FrameNode:
		v, err := DecodeNodeSession(body)
		return v.Encode(nil), err
	case FrameTokens:
		v, err := DecodeTokens(body)
		return EncodeTokens(nil, v), err
	case FrameOpen:
		v, err := DecodeOpen(body)
		if err != nil {
			return nil, err
		}
		return v.Encode(nil), nil
	case FrameRefuse, FrameRefused:
		v, err := DecodeRefusal(body)
		return EncodeRefusal(nil, t, v), err
	case FramePing, FramePong, FrameAskTokens, FrameRestarting, FrameWant:
		v, err := DecodeNumber(body)
		return EncodeNumber(nil, t, v), err
	default:
		return nil, ErrFrame
	}
}

// FuzzFrames: what parses encodes to the same bytes, and nothing panics.
func FuzzFrames(f *testing.F) {
	link := placement.LinkID{Placement: placement.ID{Workload: "web", Node: "node-1"}, Port: 8080}
	record := Record{
		Link: link, Protocol: placement.ProtocolHTTP, Kind: placement.KindContainer, Role: placement.RoleServing,
		State: placement.StateRunning, Ready: true, Order: placement.Order{Generation: 1, Epoch: 2},
	}
	for _, seed := range [][]byte{
		Hello{Version: 1, Instance: 1, Caps: 1}.Encode(nil),
		Welcome{Version: 1, Relay: "relay-1"}.Encode(nil),
		record.EncodeRegister(nil),
		Report{Record: record, Present: true}.Encode(nil),
		EncodeUnregister(nil, link),
		NodeSession{Node: "node-1", Present: true}.Encode(nil),
		EncodeTokens(nil, []Token{{1}, {2}}),
		Open{Link: link, Epoch: 3, First: []byte("hello")}.Encode(nil),
		Open{Link: placement.ServiceLink("registry")}.Encode(nil),
		Record{Link: placement.ServiceLink("registry")}.EncodeRegister(nil),
		EncodeUnregister(nil, placement.ServiceLink("registry")),
		EncodeRefusal(nil, FrameRefuse, NotReady),
		EncodeNumber(nil, FramePing, 9),
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		ft, body, err := ReadFrame(bytes.NewReader(b), nil)
		if err != nil {
			return
		}
		out, err := reencode(ft, body)
		if err != nil {
			return
		}
		require.Equal(t, b[:frameHeader+len(body)], out)
	})
}

func TestRefusal_AboutPlacement(t *testing.T) {
	// LNK-4: all but the last three are about the placement.
	for c := NotRegistered; c <= ShuttingDown; c++ {
		require.Equal(t, c < OverLimit, c.AboutPlacement(), c.String())
	}
}
