package accept

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// LNK-2: the answer of a draining placement gets the farewell once, and nothing
// that only might be the start of an answer is touched.
func TestTurns(t *testing.T) {
	const ask, answer = "POST /a HTTP/1.1\r\nHost: web\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	const told = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
	for name, c := range map[string]struct {
		steps string // > to the application, < from it
		want  string // what nginx gets last
		calm  bool   // it does not drain
	}{
		"an answer":                       {">" + ask + "|<" + answer, told, false},
		"it does not drain":               {">" + ask + "|<" + answer, answer, true},
		"a body that follows":             {">" + ask + "|>hello|<" + answer, told, false},
		"the second part of an answer":    {">" + ask + "|<HTTP/1.1 200 OK\r\n|<" + answer, answer, false},
		"the second exchange":             {">" + ask + "|<" + answer + "|>" + ask + "|<" + answer, told, false},
		"a body during an early answer":   {">" + ask + "|<" + answer + "|>hello|<" + answer, answer, false},
		"asked before it is known":        {"<" + answer, answer, false},
		"an interim answer":               {">" + ask + "|<HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 100 Continue\r\n\r\n", false},
		"an upgrade":                      {">" + ask + "|<HTTP/1.1 101 Switching Protocols\r\n\r\n", "HTTP/1.1 101 Switching Protocols\r\n\r\n", false},
		"frames of a WebSocket":           {">" + ask + "|<HTTP/1.1 101 S\r\n\r\n|>\x81\x85abcd|<HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\n", false},
		"HTTP/1.0":                        {">" + ask + "|<HTTP/1.0 200 OK\r\n\r\n", "HTTP/1.0 200 OK\r\n\r\n", false},
		"half a status line":              {">" + ask + "|<HTTP/1.1 200", "HTTP/1.1 200", false},
		"not even that":                   {">" + ask + "|<HTT", "HTT", false},
		"half a request line":             {">POST /a|<" + answer, answer, false},
		"a request line on a second line": {">x\nGET / HTTP/1.1\r\n\r\n|<" + answer, answer, false},
	} {
		t.Run(name, func(t *testing.T) {
			var s turns
			var got string
			for step := range strings.SplitSeq(c.steps, "|") {
				if step[0] == '>' {
					s.request([]byte(step[1:]))
				} else {
					got = string(s.answer([]byte(step[1:]), !c.calm))
				}
			}
			require.Equal(t, c.want, got)
		})
	}
}
