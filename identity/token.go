package identity

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// ErrToken is the cause of every refusal of a join token.
var ErrToken = errors.New("join token refused")

const (
	tokenIDBytes     = 6
	tokenSecretBytes = 32
	tokenMaxTTL      = 30 * 24 * time.Hour
	tokenKept        = 7 * 24 * time.Hour // after its end, for `token list`
	maxTokens        = 10_000             // bounds the ledger
)

// TokenTTL is how long a join token is good by default.
const TokenTTL = time.Hour

// Token is a join token as the CA remembers it: the secret only as a hash.
type Token struct {
	ID      string    `json:"id"`
	Hash    []byte    `json:"hash,omitempty"` // SHA-256 of the secret
	Role    Role      `json:"role"`
	Bound   string    `json:"boundTo,omitempty"` // the only id it is for
	Grant   Grant     `json:"workloads,omitempty"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires"`
	Used    string    `json:"used,omitempty"` // the name that joined with it
}

// TokenRequest says what a new token is for.
type TokenRequest struct {
	Role  Role
	ID    string        // empty: the joining process chooses a free id
	Grant Grant         // nodes only; empty: every workload
	TTL   time.Duration // 0: TokenTTL
}

// CreateToken returns the token's text. It is not stored and cannot be shown
// again.
func (ca *CA) CreateToken(req TokenRequest) (text string, tok Token, err error) {
	if !slices.Contains(JoinableRoles(), req.Role) {
		return "", Token{}, fmt.Errorf("%w: role %q; use node, relay, ingress or subscriber", ErrInvalidName, req.Role)
	}
	if req.ID != "" {
		if err := (Name{Role: req.Role, ID: req.ID}).Check(); err != nil {
			return "", Token{}, err
		}
	}
	switch {
	case req.Role != RoleNode && len(req.Grant) > 0:
		return "", Token{}, fmt.Errorf("%w: only a node serves workloads", ErrInvalidGrant)
	case req.Role == RoleNode && len(req.Grant) == 0:
		req.Grant = GrantAll()
	}
	if err := req.Grant.Check(); err != nil {
		return "", Token{}, err
	}
	if req.TTL == 0 {
		req.TTL = TokenTTL
	}
	if req.TTL < 0 || req.TTL > tokenMaxTTL {
		return "", Token{}, fmt.Errorf("%w: ttl: want above 0 and at most %dh, %d days", ErrToken, int(tokenMaxTTL.Hours()), int(tokenMaxTTL.Hours()/24))
	}
	id, secret := randomHex(tokenIDBytes), randomHex(tokenSecretBytes)
	sum := sha256.Sum256([]byte(secret))
	now := time.Now()
	tok = Token{ID: id, Hash: sum[:], Role: req.Role, Bound: req.ID, Grant: req.Grant, Created: now, Expires: now.Add(req.TTL)}

	ca.mu.Lock()
	defer ca.mu.Unlock()
	maps.DeleteFunc(ca.ledger.Tokens, func(_ string, t Token) bool { return now.After(t.Expires.Add(tokenKept)) })
	if len(ca.ledger.Tokens) >= maxTokens {
		return "", Token{}, fmt.Errorf("%w: %d tokens are kept already; revoke some", ErrToken, maxTokens)
	}
	ca.ledger.Tokens[id] = tok
	if err := ca.saveLocked(); err != nil {
		return "", Token{}, err
	}
	tok.Hash = nil
	return id + "." + secret + "." + ca.Fingerprint(), tok, nil
}

// Tokens returns the tokens without their hashes, oldest first.
func (ca *CA) Tokens() []Token {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	out := slices.Collect(maps.Values(ca.ledger.Tokens))
	for i := range out {
		out[i].Hash = nil
	}
	slices.SortFunc(out, func(a, b Token) int {
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return out
}

// RevokeToken forgets a token.
func (ca *CA) RevokeToken(id string) error {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	if _, ok := ca.ledger.Tokens[id]; !ok {
		return fmt.Errorf("%w: there is no token %q; see `opfield token list`", ErrToken, id)
	}
	delete(ca.ledger.Tokens, id)
	return ca.saveLocked()
}

// splitToken takes the text apart without looking into the parts.
func splitToken(text string) (id, secret, fingerprint string, err error) {
	parts := strings.Split(strings.TrimSpace(text), ".")
	if len(parts) != 3 || len(parts[0]) != 2*tokenIDBytes || len(parts[1]) != 2*tokenSecretBytes || len(parts[2]) != 2*sha256.Size {
		return "", "", "", fmt.Errorf("%w: malformed; want the whole text that `opfield token create` printed", ErrToken)
	}
	return parts[0], parts[1], parts[2], nil
}

// redeem uses the token up and issues the identity, in one step.
func (ca *CA) redeem(id, secret string, name Name, advertise string, csrPEM []byte) ([]byte, Member, error) {
	_, pub, err := parseCSR(csrPEM)
	if err != nil {
		return nil, Member{}, err
	}
	ca.mu.Lock()
	defer ca.mu.Unlock()
	tok, ok := ca.ledger.Tokens[id]
	sum := sha256.Sum256([]byte(secret))
	if !ok || subtle.ConstantTimeCompare(sum[:], tok.Hash) != 1 {
		return nil, Member{}, fmt.Errorf("%w: unknown; create one with `opfield token create`", ErrToken)
	}
	switch {
	case tok.Used != "":
		return nil, Member{}, fmt.Errorf("%w: %s joined with it already; each token works once, create another with `opfield token create`", ErrToken, tok.Used)
	case !time.Now().Before(tok.Expires):
		return nil, Member{}, fmt.Errorf("%w: it expired at %s; create another with `opfield token create`", ErrToken, tok.Expires.UTC().Format(time.RFC3339))
	case tok.Role != name.Role:
		return nil, Member{}, fmt.Errorf("%w: its role is %s, not %s", ErrToken, tok.Role, name.Role)
	case tok.Bound != "" && tok.Bound != name.ID:
		return nil, Member{}, fmt.Errorf("%w: it is for the id %q only", ErrToken, tok.Bound)
	}
	// An unbound token must not take over an id: only the operator says that
	// a member is replaced.
	if m, taken := ca.ledger.Members[name.String()]; taken && !m.Revoked && tok.Bound == "" {
		return nil, Member{}, fmt.Errorf("%w: %s exists; choose another id, or create a token with --id %s to replace it", ErrToken, name, name.ID)
	}
	tok.Used = name.String()
	ca.ledger.Tokens[id] = tok
	m := Member{Name: name, Grant: tok.Grant, Advertise: advertise, Joined: time.Now()}
	cert, err := ca.issueLocked(pub, m, nil) // saves the token with it
	return cert, ca.ledger.Members[name.String()], err
}

func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return hex.EncodeToString(b)
}
