package availability_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// LOS-5: the page about availability says plainly what is not promised. Each
// statement is one paragraph or one item of a list, whatever its words around
// these are.
func TestDocs_SayWhatIsNotPromised(t *testing.T) {
	text, err := os.ReadFile("docs/availability.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## What is not promised\n")
	require.True(t, found, "the section exists")
	section, _, _ = strings.Cut(section, "\n## ")
	var statements []string
	for _, s := range regexp.MustCompile(`\n\s*\n|\n- `).Split("\n"+section, -1) {
		statements = append(statements, strings.ToLower(strings.Join(strings.Fields(s), " ")))
	}
	for statement, terms := range map[string][]string{
		"it is no fencing: a host that is cut off may still run its copy": {"no fencing", "cut off", "may still run", "write to a database"},
		"only a lease stops that copy":                                    {"cut off", "only a lease", "would stop it"},
		"the controller must run":                                         {"controller must run", "replacements", "rollouts", "failbacks"},
		"traffic does without the controller":                             {"controller must run", "without it traffic goes on"},
		"local data is never copied":                                      {"no data is copied", "local"},
		"what else is not made available":                                 {"not made available", "controller", "nginx", "database engines", "registry's storage", "shared volumes"},
	} {
		require.True(t, anyHasAll(statements, terms), "no statement says that %s (%q)", statement, terms)
	}
}

func anyHasAll(texts, terms []string) bool {
	for _, text := range texts {
		missing := false
		for _, term := range terms {
			missing = missing || !strings.Contains(text, term)
		}
		if !missing {
			return true
		}
	}
	return false
}
