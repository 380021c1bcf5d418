package daemon_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"

	"github.com/opfield/availability/cmd/internal/daemon"
)

type program struct {
	Config kong.ConfigFlag
	Socket string

	Run   shown `cmd:""`
	Route shown `cmd:""`
}

type shown struct {
	Listen string   `default:"default"`
	Names  []string `default:"default"`
	Tries  int      `default:"1"`
}

// Run fails, so that its values come out as the error.
func (s shown) Run() error { return fmt.Errorf("%s %v %d", s.Listen, s.Names, s.Tries) }

func write(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

func TestRun_OrderOfSettings(t *testing.T) { // API-3
	for _, test := range []struct {
		name, file, env string
		args            []string
		want            string
	}{
		{"default", "", "", nil, "default"},
		{"file over default", "file", "", nil, "file"},
		{"environment over file", "file", "env", nil, "env"},
		{"environment over default", "", "env", nil, "env"},
		{"flag over all", "file", "env", []string{"--listen", "flag", "--names", "flag", "--tries", "9"}, "flag"},
	} {
		t.Run(test.name, func(t *testing.T) {
			tries := map[string]int{"default": 1, "file": 2, "env": 3, "flag": 9}
			text := "socket: x\n"
			if test.file != "" {
				text += fmt.Sprintf("listen: %s\nnames: [%s]\ntries: %d\n", test.file, test.file, tries[test.file])
			}
			if test.env != "" {
				t.Setenv("OPFIELD_LISTEN", test.env)
				t.Setenv("OPFIELD_NAMES", test.env)
				t.Setenv("OPFIELD_TRIES", fmt.Sprint(tries[test.env]))
			}
			var out bytes.Buffer
			code := daemon.Run("p", "", "", &program{}, append([]string{"run", "--config", write(t, text)}, test.args...), &out)
			require.Equal(t, daemon.ExitFailed, code, out.String())
			require.Equal(t, fmt.Sprintf("p: %s [%s] %d\n", test.want, test.want, tries[test.want]), out.String())
		})
	}
}

// A service's variables and file mean nothing to the other commands.
func TestServiceOnly(t *testing.T) {
	t.Setenv("OPFIELD_LISTEN", "env")
	t.Setenv("OPFIELD_SOCKET", "socket")
	var cli program
	parser, err := kong.New(&cli, kong.DefaultEnvars(daemon.EnvPrefix), daemon.ServiceOnly("run"), kong.Configuration(daemon.LoadConfig))
	require.NoError(t, err)
	file := write(t, "names: [file]\nlisten: file\n")
	_, err = parser.Parse([]string{"route", "--config", file})
	require.NoError(t, err)
	require.Equal(t, shown{"default", []string{"default"}, 1}, cli.Route)
	require.Equal(t, "socket", cli.Socket)
	_, err = parser.Parse([]string{"run", "--config", file})
	require.NoError(t, err)
	require.Equal(t, shown{"env", []string{"file"}, 1}, cli.Run)
}

func TestMetricsFlags(t *testing.T) { // SEC-4
	for addr, says := range map[string]string{
		"": "", "127.0.0.1:1": "", "[::1]:1": "", "localhost:1": "",
		":9100": "--metrics-anywhere", "0.0.0.0:1": "--metrics-anywhere", "[::]:1": "--metrics-anywhere", "10.0.0.1:1": "--metrics-anywhere", "host.example:1": "--metrics-anywhere",
		"9100": "host:port",
	} {
		err := daemon.MetricsFlags{Metrics: addr}.CheckMetrics()
		if says == "" {
			require.NoError(t, err, addr)
			continue
		}
		require.ErrorContains(t, err, says, addr)
		require.ErrorAs(t, err, new(daemon.UsageError))
	}
	require.NoError(t, daemon.MetricsFlags{Metrics: ":9100", MetricsAnywhere: true}.CheckMetrics())
}
