// Package registrytest pushes and pulls images over HTTP as Docker does, for
// tests without an engine.
package registrytest

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
)

// The media types of what is pushed.
const (
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar"
)

// Client talks to a registry.
type Client struct {
	HTTP           *http.Client
	Base           string // "http://host"
	User, Password string
}

type descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int    `json:"size"`
}

// Digest returns the digest of content.
func Digest(content []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(content)) }

// Do makes a request and returns the answer's status and body.
func (c *Client) Do(method, path, contentType string, body []byte) (int, http.Header, []byte, error) {
	target := c.Base + path
	if u, err := url.Parse(path); err == nil && u.IsAbs() {
		target = path
	}
	req, err := http.NewRequest(method, target, bytes.NewReader(body))
	if err != nil {
		return 0, nil, nil, err
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	req.Header.Set("Accept", typeManifest+", "+typeIndex)
	if c.User != "" {
		req.SetBasicAuth(c.User, c.Password)
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, got, err
}

func (c *Client) expect(status int, method, path, contentType string, body []byte) (http.Header, []byte, error) {
	got, header, answer, err := c.Do(method, path, contentType, body)
	if err == nil && got != status {
		err = fmt.Errorf("%s %s: status %d, want %d: %s", method, path, got, status, answer)
	}
	return header, answer, err
}

// PushBlob uploads a blob unless it is there.
func (c *Client) PushBlob(repository string, content []byte) error {
	d := Digest(content)
	status, _, _, err := c.Do(http.MethodHead, "/v2/"+repository+"/blobs/"+d, "", nil)
	if err != nil || status == http.StatusOK {
		return err
	}
	header, _, err := c.expect(http.StatusAccepted, http.MethodPost, "/v2/"+repository+"/blobs/uploads/", "", nil)
	if err != nil {
		return err
	}
	if header, _, err = c.expect(http.StatusAccepted, http.MethodPatch, header.Get("Location"), "application/octet-stream", content); err != nil {
		return err
	}
	at, err := url.Parse(header.Get("Location"))
	if err != nil {
		return err
	}
	q := at.Query()
	q.Set("digest", d)
	at.RawQuery = q.Encode()
	_, _, err = c.expect(http.StatusCreated, http.MethodPut, at.String(), "application/octet-stream", nil)
	return err
}

// PushImage uploads an image of one platform and returns its digest.
func (c *Client) PushImage(repository, tag, config string, layers ...[]byte) (string, error) {
	blobs := append([][]byte{[]byte(config)}, layers...)
	descriptors := make([]descriptor, len(blobs))
	for i, b := range blobs {
		if err := c.PushBlob(repository, b); err != nil {
			return "", err
		}
		descriptors[i] = descriptor{typeLayer, Digest(b), len(b)}
	}
	descriptors[0].MediaType = typeConfig
	return c.PushManifest(repository, tag, typeManifest, map[string]any{
		"schemaVersion": 2, "mediaType": typeManifest, "config": descriptors[0], "layers": descriptors[1:],
	})
}

// PushIndex uploads an index of images that are there, and returns its digest.
func (c *Client) PushIndex(repository, tag string, digests ...string) (string, error) {
	type entry struct {
		descriptor
		Platform map[string]string `json:"platform"`
	}
	var entries []entry
	for i, d := range digests {
		_, body, err := c.expect(http.StatusOK, http.MethodGet, "/v2/"+repository+"/manifests/"+d, "", nil)
		if err != nil {
			return "", err
		}
		arch := []string{"amd64", "arm64", "riscv64"}[i%3]
		entries = append(entries, entry{descriptor{typeManifest, d, len(body)}, map[string]string{"os": "linux", "architecture": arch}})
	}
	return c.PushManifest(repository, tag, typeIndex, map[string]any{"schemaVersion": 2, "mediaType": typeIndex, "manifests": entries})
}

// PushManifest uploads a manifest under a tag, or under its digest if the tag
// is empty.
func (c *Client) PushManifest(repository, tag, mediaType string, m any) (string, error) {
	body, err := json.Marshal(m)
	if err != nil {
		return "", err
	}
	d := Digest(body)
	if tag == "" {
		tag = d
	}
	_, _, err = c.expect(http.StatusCreated, http.MethodPut, "/v2/"+repository+"/manifests/"+tag, mediaType, body)
	return d, err
}

// Pull downloads an image, or an index with all its images, verifies every
// digest and returns the number of bytes.
func (c *Client) Pull(repository, d string) (int, error) {
	_, body, err := c.expect(http.StatusOK, http.MethodGet, "/v2/"+repository+"/manifests/"+d, "", nil)
	if err != nil {
		return 0, err
	}
	if got := Digest(body); got != d {
		return 0, fmt.Errorf("manifest %s: it has digest %s", d, got)
	}
	var m struct {
		Config            *descriptor
		Layers, Manifests []descriptor
	}
	if err := json.Unmarshal(body, &m); err != nil {
		return 0, err
	}
	total := len(body)
	for _, child := range m.Manifests {
		n, err := c.Pull(repository, child.Digest)
		if err != nil {
			return total, err
		}
		total += n
	}
	if m.Config != nil {
		m.Layers = append(m.Layers, *m.Config)
	}
	for _, l := range m.Layers {
		_, blob, err := c.expect(http.StatusOK, http.MethodGet, "/v2/"+repository+"/blobs/"+l.Digest, "", nil)
		if err != nil {
			return total, err
		}
		if got := Digest(blob); got != l.Digest {
			return total, fmt.Errorf("blob %s: it has digest %s", l.Digest, got)
		}
		total += len(blob)
	}
	return total, nil
}
