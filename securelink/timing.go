package securelink

import "time"

// All timing of the protocol. A host that became unreachable is noticed by
// either end of a control session after at most
//
//	PingAfter + Tick + UserTimeout + Tick = 1.0 s + 0.1 s + 2.0 s + 0.1 s = 3.2 s
//
// which leaves 0.3 s of the promised 3.5 s for a busy machine. A process that
// hangs while its kernel still acknowledges is given DeadAfter.
const (
	// PingAfter is the silence after which a ping is sent.
	PingAfter = time.Second
	// UserTimeout bounds how long sent data may stay unacknowledged on a
	// control connection or a pooled data connection (TCP_USER_TIMEOUT,
	// RFC 5482). It is cleared on a data connection that leaves its pool.
	UserTimeout = 2 * time.Second
	// DeadAfter is the silence after which a peer that acknowledges but does
	// not answer is dropped.
	DeadAfter = 10 * time.Second
	// Tick is how often silence is looked at.
	Tick = 100 * time.Millisecond
	// HandshakeWithin bounds everything up to the welcome frame.
	HandshakeWithin = 5 * time.Second
	// WriteWithin bounds each write on a control connection.
	WriteWithin = 5 * time.Second
	// ConnectWithin bounds the TCP connect to a relay.
	ConnectWithin = 1500 * time.Millisecond
	// OpenWithin bounds the relay's wait for the accepting end's answer. The
	// dialing end has its own, usually shorter, limit.
	OpenWithin = 9 * time.Second
	// TokenLife bounds how long an unused token admits a data connection.
	TokenLife = 60 * time.Second
	// YoungRelay is the age below which a relay that does not know a node has
	// no say about its placements: the node may still be on its way back.
	YoungRelay = 8 * time.Second

	// hedgeAfter is how long the dialing end waits for one relay's answer
	// before it tries the next one beside it.
	hedgeAfter = 250 * time.Millisecond

	retryFirst = 50 * time.Millisecond
	retryMost  = time.Second
)
