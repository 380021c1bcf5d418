package securelink

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// LNK-2: a client that swallows the early byte behind an answer gets the next
// one by itself a moment later, and none of them twice.
func TestNudger_FollowsAnAnswer(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	client, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	defer client.Close()
	server, err := ln.Accept()
	require.NoError(t, err)
	defer server.Close()
	require.NoError(t, client.SetDeadline(time.Now().Add(5*time.Second)))
	read := func(n int) string {
		b := make([]byte, n)
		_, err := io.ReadFull(client, b)
		require.NoError(t, err)
		return string(b)
	}

	n := &Nudger{TCPConn: server.(*net.TCPConn)}
	n.Ready()
	n.Nudge()
	require.Equal(t, recordStart[:1], read(1))
	early := 1
	for range 3 {
		record := recordStart + "\x00\x02xy"
		_, err := n.Write([]byte(record))
		require.NoError(t, err)
		require.Equal(t, record[early:]+recordStart[:1], read(len(record)-early+1))
		require.Equal(t, recordStart[1:2], read(1), "nobody nudged again")
		early = 2
	}
}
