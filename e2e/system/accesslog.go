package system

import (
	"encoding/json"
	"os"
	"strconv"
	"strings"
)

// Try is one attempt of nginx to have a request answered.
type Try struct {
	Endpoint string // address:port of the link
	Status   string
	Connect  float64 // seconds, with the TLS handshake; -1: not connected
	Sent     int     // request bytes
}

// Access is one line of nginx's access log.
type Access struct {
	ID       string  `json:"id"`
	Method   string  `json:"method"`
	Status   string  `json:"status"`
	Duration float64 `json:"-"`
	Tries    []Try   `json:"-"`
}

// AccessLog reads the ingress node's access log. Every line must be JSON.
func (s *System) AccessLog() []Access {
	s.tb.Helper()
	data, err := os.ReadFile(s.Ingress.Path("log", "access.log"))
	if err != nil {
		s.tb.Fatalf("access log: %v", err)
	}
	var all []Access
	for line := range strings.Lines(string(data)) {
		if !strings.HasSuffix(line, "\n") {
			break // being written
		}
		var raw struct {
			Access
			Duration, Upstream, UpstreamStatus, UpstreamConnect, UpstreamSent string
		}
		if err := json.Unmarshal([]byte(line), &raw); err != nil {
			s.tb.Fatalf("access log: %v: %s", err, line)
		}
		a := raw.Access
		a.Duration, _ = strconv.ParseFloat(raw.Duration, 64)
		status, connect, sent := tries(raw.UpstreamStatus), tries(raw.UpstreamConnect), tries(raw.UpstreamSent)
		for i, endpoint := range tries(raw.Upstream) {
			t := Try{Endpoint: endpoint, Connect: -1}
			if i < len(status) {
				t.Status = status[i]
			}
			if i < len(connect) {
				if v, err := strconv.ParseFloat(connect[i], 64); err == nil {
					t.Connect = v
				}
			}
			if i < len(sent) {
				t.Sent, _ = strconv.Atoi(sent[i])
			}
			a.Tries = append(a.Tries, t)
		}
		all = append(all, a)
	}
	return all
}

// tries splits nginx's lists: ", " between tries, " : " between locations.
func tries(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(strings.ReplaceAll(s, " : ", ", "), ", ")
}
