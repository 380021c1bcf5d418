package system

import (
	"context"
	"fmt"
	"io"
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
