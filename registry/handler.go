package registry

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/opencontainers/go-digest"
)

// Codes of the distribution specification, and one of our own: Docker tries
// again after an error whose code it does not know.
const (
	codeDenied      = "DENIED"
	codeUnsupported = "UNSUPPORTED"
	codeUnavailable = "UNAVAILABLE"
)

// results of a request, as metric labels.
const (
	resultOK          = "ok"
	resultRefused     = "refused"
	resultUnavailable = "unavailable"
	resultFailed      = "failed"
)

// ServeHTTP implements http.Handler: it lets through what the calling node may
// do, and nothing else.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	node, ok := s.caller(r)
	if !ok {
		s.refuse(w, "other", http.StatusForbidden, codeDenied, "only nodes may use the registry")
		return
	}
	t, ok := parse(r)
	if !ok {
		s.refuse(w, "other", http.StatusMethodNotAllowed, codeUnsupported, "the internal registry answers pulls and pushes of single images only")
		return
	}
	if !s.granted(r.Context(), node, t) {
		s.cfg.Logger.Warn("registry request refused", "node", node, "operation", t.operation.String(), "repository", t.repository)
		s.refuse(w, t.operation.String(), http.StatusForbidden, codeDenied, "node "+node+" may not do that with repository "+t.repository)
		return
	}
	app := s.app.Load()
	if app == nil {
		s.metrics.requests.WithLabelValues(t.operation.String(), resultUnavailable).Inc()
		unavailable(w, "the registry is starting")
		return
	}
	if s.cfg.Grants.MayPush(node, t.repository) {
		// The removal must not come between a push's question for a blob and
		// the manifest that names it.
		s.pushes.RLock()
		defer s.pushes.RUnlock()
		if t.blob != "" && r.Method == http.MethodHead {
			s.touch(t.blob)
		}
	}
	if t.mount && !s.may(node, target{operation: pull, repository: t.from}) {
		// Without the parameters it is the beginning of an upload.
		r = r.Clone(r.Context())
		q := r.URL.Query()
		q.Del("mount")
		q.Del("from")
		r.URL.RawQuery = q.Encode()
	} else if t.mount {
		s.touch(digest.Digest(r.URL.Query().Get("mount")))
	}
	rec := &recorder{ResponseWriter: w}
	(*app).ServeHTTP(rec, r)
	result := resultOK
	if rec.status >= http.StatusInternalServerError {
		result = resultFailed
		s.cfg.Logger.Warn("registry request failed", "node", node, "method", r.Method, "path", r.URL.Path, "status", rec.status)
	}
	s.metrics.requests.WithLabelValues(t.operation.String(), result).Inc()
}

// granted is may, with a moment for a right that is just being given.
func (s *Server) granted(ctx context.Context, node string, t target) bool {
	for end := time.Now().Add(grantWithin); ; pause(ctx, grantEvery) {
		if s.may(node, t) {
			return true
		}
		if ctx.Err() != nil || time.Now().After(end) {
			return false
		}
	}
}

// may reports whether the node may do that. Whoever may push may also look
// whether something is there.
func (s *Server) may(node string, t target) bool {
	switch t.operation {
	case ping:
		return true
	case pull:
		return s.cfg.Grants.MayPull(node, t.repository) || s.cfg.Grants.MayPush(node, t.repository)
	case push:
		return s.cfg.Grants.MayPush(node, t.repository)
	default:
		return false
	}
}

// touch notes that a push counts on the blob.
func (s *Server) touch(d digest.Digest) {
	if d.Validate() != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.touched[d] = time.Now()
}

func (s *Server) refuse(w http.ResponseWriter, operation string, status int, code, message string) {
	s.metrics.requests.WithLabelValues(operation, resultRefused).Inc()
	answer(w, status, code, message)
}

// unavailable answers that the caller shall try again: Docker does for this
// form only.
func unavailable(w http.ResponseWriter, message string) {
	w.Header().Set("Retry-After", "1")
	answer(w, http.StatusServiceUnavailable, codeUnavailable, message)
}

func answer(w http.ResponseWriter, status int, code, message string) {
	type item struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string][]item{"errors": {{code, message}}})
}

// recorder notes the status of an answer.
type recorder struct {
	http.ResponseWriter
	status int
}

// WriteHeader implements http.ResponseWriter.
func (r *recorder) WriteHeader(status int) {
	r.status = status
	r.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }
