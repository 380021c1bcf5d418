package api_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// codesOf returns the value of every constant of a folder whose name begins
// with Code.
func codesOf(t *testing.T, dir string) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	out := map[string]bool{}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		require.NoError(t, err)
		ast.Inspect(file, func(n ast.Node) bool {
			v, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			for i, id := range v.Names {
				if !strings.HasPrefix(id.Name, "Code") || i >= len(v.Values) {
					continue
				}
				if lit, ok := v.Values[i].(*ast.BasicLit); ok && lit.Kind == token.STRING {
					text, err := strconv.Unquote(lit.Value)
					require.NoError(t, err)
					out[text] = true
				}
			}
			return true
		})
	}
	require.NotEmpty(t, out, dir)
	return out
}

// API-1: every code is explained, with what to do, and none that is gone.
func TestCodesAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../docs/api.md")
	require.NoError(t, err)
	_, text2, ok := strings.Cut(string(text), "### Codes of availability")
	require.True(t, ok)
	documented := map[string]bool{}
	row := regexp.MustCompile("^\\| `([A-Z_]+)` \\|")
	for line := range strings.SplitSeq(text2, "\n") {
		m := row.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		require.False(t, documented[m[1]], "%s is there twice", m[1])
		documented[m[1]] = true
		for _, cell := range strings.Split(strings.Trim(line, "|"), "|") {
			require.NotEmpty(t, strings.TrimSpace(cell), line)
		}
	}
	codes := map[string]bool{}
	for _, dir := range []string{".", "../policy", "../placement"} {
		for code := range codesOf(t, dir) {
			codes[code] = true
			require.True(t, documented[code], "docs/api.md says nothing of %s (of %s)", code, dir)
		}
	}
	for code := range documented {
		require.True(t, codes[code], "docs/api.md has %s, which does not exist", code)
	}
}
