package ingress_test

import (
	"encoding/json"
	"strings"
)

// validLines counts the lines of a log, or returns -1 if one is no JSON.
func validLines(text string) int {
	n := 0
	for line := range strings.Lines(text) {
		if !strings.HasSuffix(line, "\n") {
			break
		}
		if !json.Valid([]byte(line)) {
			return -1
		}
		n++
	}
	return n
}
