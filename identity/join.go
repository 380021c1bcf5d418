package identity

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	// JoinPath is the path of the join endpoint.
	JoinPath = "/v1/join"

	joinBody   = 64 << 10         // request and answer
	joinWithin = 20 * time.Second // the whole call of the client
)

// joinCall is the body of a join request.
type joinCall struct {
	TokenID   string `json:"tokenId"`
	Secret    string `json:"secret"`
	Name      Name   `json:"name"`
	Advertise string `json:"advertise,omitempty"`
	CSR       []byte `json:"csr"`
}

// joinAnswer is the body of the answer.
type joinAnswer struct {
	Certificate []byte    `json:"certificate"`
	Bootstrap   Bootstrap `json:"bootstrap"`
}

// problem is an RFC 9457 problem document.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Code   string `json:"code"`
	Detail string `json:"detail"`
}

// JoinRequest says who joins where.
type JoinRequest struct {
	Token      string
	Controller string // host:port
	Name       Name
	Advertise  string // relays: host:port that others dial
	Dir        string // where the identity is kept
}

// Join exchanges a token for an identity and keeps it in req.Dir. The secret
// is sent only to a server whose certificate was signed by the CA whose
// fingerprint is in the token.
func Join(ctx context.Context, req JoinRequest) (*Identity, error) {
	id, secret, pin, err := splitToken(req.Token)
	if err != nil {
		return nil, err
	}
	if err := req.Name.Check(); err != nil {
		return nil, err
	}
	if err := CheckAddress(req.Advertise); req.Name.Role == RoleRelay && err != nil {
		return nil, fmt.Errorf("advertise: %w", err)
	}
	if err := os.MkdirAll(req.Dir, dirMode); err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	// A new identity has a new key: the old one may be why it joins again.
	keyFile := filepath.Join(req.Dir, "identity.key")
	fresh := filepath.Join(req.Dir, "identity.key.joining")
	if err := os.RemoveAll(fresh); err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	defer os.Remove(fresh)
	key, err := openKey(fresh)
	if err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	csr, err := newCSR(key, req.Name.ID)
	if err != nil {
		return nil, err
	}
	call := joinCall{TokenID: id, Secret: secret, Name: req.Name, Advertise: req.Advertise, CSR: csr}
	var ca *x509.Certificate
	answer, err := post(ctx, req.Controller, call, pinned(pin, &ca))
	if err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	cert, err := parseCertificate(answer.Certificate)
	if err != nil || !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("join: the answer's certificate is not for our key: %w", errors.Join(err, ErrPeer))
	}
	if answer.Bootstrap.Controller == "" {
		answer.Bootstrap.Controller = req.Controller
	}
	if err := os.Rename(fresh, keyFile); err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	rec := record{Name: req.Name, Bootstrap: answer.Bootstrap}
	return create(req.Dir, rec, answer.Certificate, encodeCertificate(ca.Raw))
}

// pinned accepts a server only if a CA with the fingerprint signed the
// certificate of the controller. *ca is set to that CA.
func pinned(fp string, ca **x509.Certificate) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		ServerName:         ControllerName().ServerName(),
		InsecureSkipVerify: true, // replaced by the stricter check below
		VerifyConnection: func(cs tls.ConnectionState) error {
			roots := x509.NewCertPool()
			for _, c := range cs.PeerCertificates[1:] {
				if fingerprint(c) == fp && c.IsCA {
					*ca = c
					roots.AddCert(c)
				}
			}
			if *ca == nil {
				return fmt.Errorf("%w: it is not the controller that made the token (CA fingerprint differs); check the address and the token", ErrPeer)
			}
			leaf := cs.PeerCertificates[0]
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: ControllerName().ServerName()}); err != nil {
				return fmt.Errorf("%w: %w", ErrPeer, err)
			}
			return nil
		},
	}
}

func post(ctx context.Context, controller string, call joinCall, conf *tls.Config) (joinAnswer, error) {
	body, err := json.Marshal(call)
	if err != nil {
		return joinAnswer{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, joinWithin)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+controller+JoinPath, bytes.NewReader(body))
	if err != nil {
		return joinAnswer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	client := &http.Client{
		Transport:     &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true, Proxy: nil},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	resp, err := client.Do(req)
	if ue, ok := errors.AsType[*url.Error](err); ok { // its text has the address of the call
		err = ue.Err
	}
	if _, ok := errors.AsType[*net.OpError](err); ok {
		return joinAnswer{}, fmt.Errorf("controller %s not reached: %w; check its name, its join port (8480 by default) and the firewall", controller, err)
	}
	if err != nil {
		return joinAnswer{}, fmt.Errorf("controller %s: %w", controller, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, joinBody))
	if err != nil {
		return joinAnswer{}, err
	}
	if resp.StatusCode != http.StatusOK {
		var p problem
		if json.Unmarshal(b, &p) != nil || p.Detail == "" {
			return joinAnswer{}, fmt.Errorf("the controller answered %s", resp.Status)
		}
		return joinAnswer{}, fmt.Errorf("%w by the controller: %s (%s)", ErrRefused, p.Detail, p.Code)
	}
	var a joinAnswer
	return a, json.Unmarshal(b, &a)
}

// CheckAddress reports why addr is no host:port that others can dial.
func CheckAddress(addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || host == "" || port == "" || port == "0" || strings.ContainsAny(host, " /\"\\") {
		return fmt.Errorf("%q: want host:port, the address that others dial", addr)
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		return fmt.Errorf("%q: want an address that others can dial", addr)
	}
	if _, err := net.LookupPort("tcp", port); err != nil {
		return fmt.Errorf("%q: port: want 1 to 65535", addr)
	}
	return nil
}

func isJSON(r *http.Request) bool {
	t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && t == "application/json"
}
