package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCompletion(t *testing.T) { // API-3
	var script, talk bytes.Buffer
	require.Zero(t, run(t.Context(), []string{"completion", "bash"}, &script, &talk), talk.String())
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "routes.yaml"), nil, 0o600))
	complete := func(line ...string) []string {
		t.Helper()
		cmd := exec.Command("bash", "-euc", script.String()+`COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _opfield; printf '%s\n' "${COMPREPLY[@]}"`, "bash")
		cmd.Args, cmd.Dir = append(append(cmd.Args, "opfield"), line...), dir
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		return strings.Fields(string(out))
	}
	require.Equal(t, []string{"route"}, complete("ro"))
	require.Equal(t, []string{"add", "apply"}, complete("route", "a"))
	require.Equal(t, []string{"add", "apply"}, complete("--json", "--socket", "/x", "route", "a"))
	require.Equal(t, []string{"--host"}, complete("route", "add", "shop", "--ho"))
	require.Equal(t, []string{"relay"}, complete("token", "create", "--role", "re"))
	require.Equal(t, []string{"routes.yaml"}, complete("route", "apply", "-f", "r"))
	require.Equal(t, []string{"bash"}, complete("completion", "ba"))
	require.Contains(t, complete("workloads", ""), "--json")
	require.Empty(t, complete("route", "add", "shop", "--host", ""))
	require.Equal(t, exitUsage, run(t.Context(), []string{"completion", "csh"}, &script, &talk))
}
