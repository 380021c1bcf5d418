package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/cmd/internal/daemon"
)

func TestRun_MetricsBeyondLoopback(t *testing.T) { // SEC-4
	var out bytes.Buffer
	args := []string{"run", "--check-config", "--identity-dir", t.TempDir(), "--metrics", ":0"}
	require.Equal(t, daemon.ExitUsage, daemon.Run("opfield-node", "", "", &cli{}, args, &out))
	require.Contains(t, out.String(), "--metrics-anywhere")
	out.Reset()
	require.Equal(t, daemon.ExitFailed, daemon.Run("opfield-node", "", "", &cli{}, append(args, "--metrics-anywhere"), &out))
	require.Contains(t, out.String(), "identity in")
}
