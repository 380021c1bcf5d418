package registry

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"

	"github.com/opfield/availability/identity"
)

// callerKey is the key of the caller's TLS state in the context of a request.
type callerKey struct{}

// verified is a connection whose other end has shown its certificate.
type verified interface{ Caller() tls.ConnectionState }

func withCaller(ctx context.Context, c net.Conn) context.Context {
	if v, ok := c.(verified); ok {
		return context.WithValue(ctx, callerKey{}, v.Caller())
	}
	return ctx
}

// caller returns the id of the node that makes the request. A node that was
// revoked since it connected is refused too.
func (s *Server) caller(r *http.Request) (string, bool) {
	state, ok := r.Context().Value(callerKey{}).(tls.ConnectionState)
	if !ok {
		return "", false
	}
	name, err := identity.PeerName(state)
	if err != nil || name.Role != identity.RoleNode || s.cfg.Identity.Revoked(state.VerifiedChains[0][0]) {
		return "", false
	}
	return name.ID, true
}
