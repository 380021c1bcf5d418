package api

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/opfield/availability/identity"
)

// TokenOrder is the body of POST /v1/tokens.
type TokenOrder struct {
	Role      identity.Role `json:"role"`
	ID        string        `json:"id,omitempty"`
	Workloads string        `json:"workloads,omitempty"` // comma-separated patterns
	TTL       string        `json:"ttl,omitempty"`       // such as "1h"
}

// NewToken is its answer. Token is shown this once.
type NewToken struct {
	Text string         `json:"token"`
	For  identity.Token `json:"for"`
}

// TokenList is the answer of GET /v1/tokens.
type TokenList struct {
	Tokens []identity.Token `json:"tokens"`
}

// IdentityList is the answer of GET /v1/identities.
type IdentityList struct {
	Identities []identity.Member `json:"identities"`
}

func (s *Server) createToken(_ context.Context, r *http.Request) (any, error) {
	var order TokenOrder
	if err := decode(r, &order); err != nil {
		return nil, err
	}
	req := identity.TokenRequest{Role: order.Role, ID: order.ID}
	var err error
	if order.TTL != "" {
		if req.TTL, err = time.ParseDuration(order.TTL); err != nil || req.TTL <= 0 {
			return nil, Violations{{CodeTokenInvalid, "ttl", "want a duration such as 1h"}}
		}
	}
	if order.Workloads != "" {
		if req.Grant, err = identity.ParseGrant(order.Workloads); err != nil {
			return nil, Violations{{CodeTokenInvalid, "workloads", err.Error()}}
		}
	}
	text, tok, err := s.CA.CreateToken(req)
	if err != nil {
		return nil, err
	}
	s.Logger.Info("join token created", "token", tok.ID, "role", string(tok.Role), "expires", tok.Expires)
	return NewToken{Text: text, For: tok}, nil
}

func (s *Server) listTokens(context.Context, *http.Request) (any, error) {
	return TokenList{append([]identity.Token{}, s.CA.Tokens()...)}, nil
}

func (s *Server) revokeToken(_ context.Context, r *http.Request) (any, error) {
	if err := s.CA.RevokeToken(r.PathValue("id")); err != nil {
		return nil, refuse(http.StatusNotFound, CodeTokenUnknown, "%s", without(err, identity.ErrToken))
	}
	s.Logger.Info("join token revoked", "token", r.PathValue("id"))
	return struct{}{}, nil
}

func (s *Server) listIdentities(context.Context, *http.Request) (any, error) {
	return IdentityList{append([]identity.Member{}, s.CA.Members()...)}, nil
}

// revokeIdentity is done when the CA has it on disk; telling everybody else is
// repeated by whoever Config.Revoked belongs to.
func (s *Server) revokeIdentity(_ context.Context, r *http.Request) (any, error) {
	var name identity.Name
	if err := decode(r, &name); err != nil {
		return nil, err
	}
	rev, err := s.CA.Revoke(name)
	if err != nil {
		return nil, refuse(http.StatusUnprocessableEntity, CodeIdentityDenied, "%s", without(err, identity.ErrRefused))
	}
	s.Logger.Warn("identity revoked", "identity", name.String())
	if s.Revoked != nil {
		s.Revoked(s.CA.Revocations())
	}
	return rev, nil
}

// without returns the text of err without the kind that it begins with: that
// is about joining and signing, and a caller of the API asked for neither.
func without(err, kind error) string { return strings.TrimPrefix(err.Error(), kind.Error()+": ") }
