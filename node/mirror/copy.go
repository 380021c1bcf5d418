package mirror

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync/atomic"
	"time"
	"unicode"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/errcode"
)

const (
	parallel    = 3             // blobs at once, as Docker does
	stallWithin = time.Minute   // without a byte
	copyWithin  = 2 * time.Hour // all of it: a source that drips must end
	attempts    = 3             // that bring nothing new
	retryFirst  = time.Second   // then twice as long
	maxReason   = 300
)

var (
	errStalled = errors.New("no progress")
	errLate    = errors.New("it takes too long")
	errGone    = errors.New("an image that was copied is not there any more")
)

// address is one in an error's text.
var address = regexp.MustCompile(`"?\bhttps?://\S+`)

// Copy copies the images, and then the index, as it is. Config is the digest
// of the configuration that runs on this node, which one of the images must
// have; "" if the digest of the index says enough.
//
// A copy that is cut or stands still is tried again with what is missing. An
// error that is ErrSource is the source's; any other the target's.
func (s *Source) Copy(ctx context.Context, to *Target, config string) error {
	limited, cancel := context.WithTimeoutCause(ctx, copyWithin, errLate)
	defer cancel()
	j := &job{Source: s, to: to, config: config, stall: stallWithin}
	for failed, wait := 0, retryFirst; ; wait *= 2 {
		before := j.copied.Load()
		err := j.attempt(limited)
		switch of, ok := errors.AsType[*sourceError](err); {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case limited.Err() != nil:
			return j.fault(context.Cause(limited))
		case !ok:
			return err
		case !again(of.err):
			return j.fault(of.err)
		case j.copied.Load() > before:
			failed, wait = 1, retryFirst
		default:
			if failed++; failed == attempts {
				return j.fault(of.err)
			}
		}
		select {
		case <-limited.Done():
		case <-time.After(wait):
		}
	}
}

// sourceError is an error of the source while it is copied.
type sourceError struct{ err error }

func (e *sourceError) Error() string { return e.err.Error() }
func (e *sourceError) Unwrap() error { return e.err }

// job is one Copy.
type job struct {
	*Source
	to     *Target
	config string
	stall  time.Duration
	copied atomic.Int64 // blobs and manifests
	alive  func()       // of the attempt
}

func (j *job) fault(err error) error {
	return fmt.Errorf("%w, %s: %s", ErrSource, j.repository.Reference.Registry, short(err))
}

// attempt copies what is missing.
func (j *job) attempt(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stall := time.AfterFunc(j.stall, func() { cancel(errStalled) })
	defer stall.Stop()
	j.alive = func() { stall.Reset(j.stall) }
	err := j.all(ctx)
	if err != nil && errors.Is(context.Cause(ctx), errStalled) {
		return &sourceError{fmt.Errorf("%w for %v", errStalled, j.stall)}
	}
	return err
}

func (j *job) all(ctx context.Context) error {
	if err := j.manifests(ctx, j.config); err != nil {
		return &sourceError{err}
	}
	for _, c := range j.images {
		if err := j.image(ctx, c.Descriptor); err != nil {
			return err
		}
	}
	// The registry does not ask for what an index names, because images for
	// other systems are not there. What was copied an hour ago may be removed.
	for _, c := range j.images {
		there, err := j.to.repository.Manifests().Exists(ctx, c.Descriptor)
		if err != nil {
			return err
		}
		if !there {
			return fmt.Errorf("%w: %s", errGone, c.Digest)
		}
		j.alive()
	}
	return j.to.repository.Manifests().Push(ctx, j.index, bytes.NewReader(j.raw))
}

// image copies an image: its blobs, then its manifest.
func (j *job) image(ctx context.Context, d ocispec.Descriptor) error {
	manifests := j.to.repository.Manifests()
	there, err := manifests.Exists(ctx, d)
	if err != nil || there {
		j.alive()
		return err
	}
	m := j.read[d.Digest]
	g, within := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	done := map[string]bool{}
	for _, b := range m.blobs {
		if !done[b.Digest.String()] {
			done[b.Digest.String()] = true
			g.Go(func() error { return j.blob(within, b) })
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	j.alive()
	if err := manifests.Push(ctx, d, bytes.NewReader(m.raw)); err != nil {
		return err
	}
	j.copied.Add(1)
	return nil
}

func (j *job) blob(ctx context.Context, d ocispec.Descriptor) error {
	there, err := j.to.repository.Blobs().Exists(ctx, d)
	if err != nil || there {
		j.alive()
		return err
	}
	body, err := j.repository.Blobs().Fetch(ctx, d)
	if err != nil {
		return &sourceError{err}
	}
	defer body.Close()
	from := &reader{body: body, left: d.Size, want: d.Digest.Encoded(), sum: sha256.New(), alive: j.alive}
	if err := j.to.repository.Blobs().Push(ctx, d, from); err != nil {
		if failed := from.failed.Load(); failed != nil {
			return &sourceError{*failed}
		}
		return err
	}
	j.copied.Add(1)
	return nil
}

// reader reads a blob of the source. It ends with an error before its last
// bytes are given if they are not what the digest says.
type reader struct {
	body   io.Reader
	left   int64
	want   string // hexadecimal
	sum    hash.Hash
	alive  func()
	failed atomic.Pointer[error] // why reading ended
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	if r.left == 0 && r.sum == nil {
		return 0, io.EOF
	}
	n, err := r.body.Read(p[:min(int64(len(p)), r.left)])
	r.left -= int64(n)
	_, _ = r.sum.Write(p[:n]) // never fails
	switch {
	case r.left == 0 && hex.EncodeToString(r.sum.Sum(nil)) != r.want:
		err = fmt.Errorf("%w: a part has another digest", errContent)
	case r.left == 0:
		r.sum, err = nil, nil
	case errors.Is(err, io.EOF):
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		r.failed.Store(&err)
		return 0, err
	}
	if n > 0 {
		r.alive()
	}
	return n, nil
}

// again reports whether an error may be one of the moment.
func again(err error) bool {
	if resp, ok := errors.AsType[*errcode.ErrorResponse](err); ok {
		return resp.StatusCode >= http.StatusInternalServerError || resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusRequestTimeout
	}
	if errors.Is(err, errRedirect) || errors.Is(err, errContent) {
		return false
	}
	_, network := errors.AsType[net.Error](err)
	return network || errors.Is(err, errStalled) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed)
}

// short says an error in words of ours: addresses may hold signatures, and
// what a stranger writes is not for the operator's terminal.
func short(err error) string {
	text := ""
	if resp, ok := errors.AsType[*errcode.ErrorResponse](err); ok {
		text = fmt.Sprintf("it answers %d %s", resp.StatusCode, http.StatusText(resp.StatusCode))
		if resp.StatusCode == http.StatusUnauthorized || resp.StatusCode == http.StatusForbidden {
			text += ", so it may want credentials, and none are used"
		}
	} else if errors.Is(err, auth.ErrBasicCredentialNotFound) {
		text = "it wants credentials, and none are used"
	} else if u, ok := errors.AsType[*url.Error](err); ok {
		text = u.Err.Error()
	} else {
		text = err.Error()
	}
	text = address.ReplaceAllString(text, "…")
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text)
	if len(text) > maxReason {
		text = strings.ToValidUTF8(text[:maxReason], "") + "…"
	}
	return text
}

// unchecked is for registries that Docker takes as insecure.
func unchecked() *tls.Config {
	return &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}
}
