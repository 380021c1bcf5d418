package bus

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/opfield/availability/identity"
)

// signing is the body of a request to the CA.
type signing struct {
	CSR []byte `json:"csr"`
	identity.SignRequest
}

// Sign asks the controller's CA for a certificate. It implements
// identity.Signer.
func (c *Conn) Sign(ctx context.Context, csrPEM []byte, req identity.SignRequest) ([]byte, error) {
	body, err := json.Marshal(signing{CSR: csrPEM, SignRequest: req})
	if err != nil {
		return nil, err
	}
	msg := nats.NewMsg(member(subjectSign, c.identity.Name()))
	msg.Data = body
	answer, err := c.request(ctx, msg)
	if err != nil {
		return nil, err
	}
	if text := answer.Header.Get(errorHeader); text != "" {
		return nil, fmt.Errorf("%w: %s", identity.ErrRefused, text)
	}
	return answer.Data, nil
}

// AnswerSign lets signer answer the Sign calls of all identities until ctx
// ends. It is for the controller.
func (c *Conn) AnswerSign(ctx context.Context, signer identity.Signer) error {
	return c.serve(ctx, subjectSign, func(ctx context.Context, r request) ([]byte, error) {
		var body signing
		if err := json.Unmarshal(r.data, &body); err != nil {
			return nil, fmt.Errorf("%w: %w", identity.ErrRefused, err)
		}
		return signer.Sign(ctx, body.CSR, body.SignRequest)
	})
}
