package availability_test

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// OBS-1: the dashboard is valid JSON and asks only for metrics that a daemon
// has.
func TestDashboard_AsksForMetricsThatExist(t *testing.T) {
	data, err := os.ReadFile("docs/grafana/opfield-availability.json")
	require.NoError(t, err)
	var dashboard struct {
		Panels []struct {
			Title   string `json:"title"`
			Targets []struct {
				Expr string `json:"expr"`
			} `json:"targets"`
		} `json:"panels"`
	}
	require.NoError(t, json.Unmarshal(data, &dashboard))
	require.NotEmpty(t, dashboard.Panels)
	metric := regexp.MustCompile(`opfield_[a-z_]+`)
	exist := map[string]bool{}
	for _, dir := range []string{"bus", "relay", "node", "ingress", "api", "cmd"} {
		require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			source, err := os.ReadFile(path)
			for _, name := range metric.FindAllString(string(source), -1) {
				exist[name] = true
			}
			return err
		}))
	}
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			names := metric.FindAllString(target.Expr, -1)
			require.NotEmpty(t, names, p.Title)
			for _, name := range names {
				require.True(t, exist[name], "%s: %s", p.Title, name)
			}
		}
	}
}
