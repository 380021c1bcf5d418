package securelink

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"crypto/tls"

	"github.com/opfield/availability/placement"
)

// A service refuses streams of other links and, once closed, every one.
func TestService_Refuses(t *testing.T) {
	s := NewService(ServiceConfig{Name: "registry", TLS: &tls.Config{}, Logger: slog.New(slog.DiscardHandler)})
	require.True(t, s.Record().Serves())
	require.Equal(t, "service/registry", s.Record().Link.String())
	ask := func(l placement.LinkID) Code {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer ln.Close()
		far, err := net.Dial("tcp", ln.Addr().String())
		require.NoError(t, err)
		defer far.Close()
		near, err := ln.Accept()
		require.NoError(t, err)
		s.Take(&Incoming{Open: Open{Link: l}, conn: near.(*net.TCPConn)})
		ft, body, err := ReadFrame(far, nil)
		require.NoError(t, err)
		require.Equal(t, FrameRefuse, ft)
		code, err := DecodeRefusal(body)
		require.NoError(t, err)
		return code
	}
	require.Equal(t, NotRegistered, ask(placement.ServiceLink("database")))
	require.Equal(t, NotRegistered, ask(placement.LinkID{Placement: placement.ID{Workload: "registry", Node: "node-1"}, Port: 1}))
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	require.Equal(t, ShuttingDown, ask(placement.ServiceLink("registry")))
	_, err := s.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
}

// The bytes that came with OPEN are read first.
func TestBegun(t *testing.T) {
	a, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer a.Close()
	far, err := net.Dial("tcp", a.Addr().String())
	require.NoError(t, err)
	near, err := a.Accept()
	require.NoError(t, err)
	_, err = far.Write([]byte("world"))
	require.NoError(t, errors.Join(err, far.Close()))
	got, err := io.ReadAll(&begun{TCPConn: near.(*net.TCPConn), first: []byte("hello ")})
	require.NoError(t, err)
	require.Equal(t, "hello world", string(got))
}
