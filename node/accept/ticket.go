package accept

import "crypto/tls"

// keepsTicket returns a GetConfigForClient that sends no new session ticket
// when a session is resumed: nginx goes on using the one it has, and taking in
// another costs it CPU time at every connection. (RFC 8446 appendix C.4 asks
// for new ones so that an observer cannot link connections; all of ours come
// from the ingress node anyway.) A session that is too old, or whose client
// certificate has expired, leads to a full handshake with a new ticket.
func keepsTicket(base *tls.Config) func(*tls.ClientHelloInfo) (*tls.Config, error) {
	return func(*tls.ClientHelloInfo) (*tls.Config, error) {
		own := base.Clone()
		own.UnwrapSession = func(ticket []byte, cs tls.ConnectionState) (*tls.SessionState, error) {
			session, err := base.DecryptTicket(ticket, cs)
			// That the setting also refuses tickets has no effect any more.
			own.SessionTicketsDisabled = session != nil
			return session, err
		}
		own.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			own.SessionTicketsDisabled = false // only a full handshake needs a certificate
			if base.GetCertificate == nil {
				return nil, nil
			}
			return base.GetCertificate(hello)
		}
		return own, nil
	}
}
