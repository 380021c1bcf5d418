package main

import (
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/opfield/availability/api"
)

type certCmd struct {
	Add    certAddCmd    `cmd:"" help:"Add or renew a certificate."`
	List   certListCmd   `cmd:"" help:"List certificates."`
	Remove certRemoveCmd `cmd:"" help:"Remove a certificate that no route uses."`
}

type certAddCmd struct {
	Name string `arg:"" help:"Name that routes refer to, such as example.com."`
	Cert string `help:"PEM file with the certificate and its chain." required:"" type:"existingfile"`
	Key  string `help:"PEM file with the private key." required:"" type:"existingfile"`
}

func (c *certAddCmd) Run(s *session) error {
	cert, err := os.ReadFile(c.Cert)
	if err != nil {
		return err
	}
	key, err := os.ReadFile(c.Key)
	if err != nil {
		return err
	}
	var out api.Cert
	up := api.CertUpload{Certificate: string(cert), Key: string(key)}
	if err := s.client.call(s.ctx, http.MethodPut, "/v1/certs/"+url.PathEscape(c.Name), up, &out); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(out)
	}
	s.say("certificate %s for %s is good until %s", out.Name, strings.Join(out.Names, ", "), when(out.Expires))
	return nil
}

type certListCmd struct{}

func (certListCmd) Run(s *session) error {
	var out struct {
		Certs []api.Cert `json:"certs"`
	}
	if err := s.client.call(s.ctx, http.MethodGet, "/v1/certs", nil, &out); err != nil {
		return err
	}
	if s.json {
		return s.printJSON(out)
	}
	rows := [][]string{{"CERTIFICATE", "HOSTS", "EXPIRES", "ISSUER", "ERROR"}}
	for _, c := range out.Certs {
		rows = append(rows, []string{c.Name, strings.Join(c.Names, " "), when(c.Expires), c.Issuer, c.Error})
	}
	return table(s.out, rows)
}

type certRemoveCmd struct {
	Name string `arg:""`
}

func (c *certRemoveCmd) Run(s *session) error {
	return s.client.call(s.ctx, http.MethodDelete, "/v1/certs/"+url.PathEscape(c.Name), nil, nil)
}
