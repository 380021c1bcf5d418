package system

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/opfield/availability/e2e/lab"
)

const getWithin = 5 * time.Second

func client(h *lab.Host) *http.Client {
	return &http.Client{
		Timeout:   getWithin,
		Transport: &http.Transport{DialContext: h.DialContext, DisableKeepAlives: true},
	}
}

// API reads from the controller's API over its socket: no command is started,
// so what lasts for milliseconds is seen.
func (s *System) API(path string, v any) error {
	c := http.Client{Timeout: getWithin, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", s.socket(s.Controller.Host))
	}}}
	resp, err := c.Get("http://controller" + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", path, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(v)
}

// Get fetches a URL from inside a host.
func Get(h *lab.Host, url string) ([]byte, error) {
	resp, err := client(h).Get(url)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %s", url, resp.Status, body)
	}
	return body, err
}

// GetHost sends one GET with a Host header; status 0 means no answer.
func GetHost(h *lab.Host, addr, host, path string) (status int, body string) {
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return 0, ""
	}
	req.Host = host
	resp, err := client(h).Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(b)
}
