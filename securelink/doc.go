// Package securelink is the secure link protocol, version 1: the frames, the
// control session of a peer with a relay, the pools of data connections, the
// dialing end and the accepting end of a stream, and the rules for how a
// stream ends. docs/protocol.md describes the wire.
//
// It does not know nginx, Docker, NATS or certificates: TLS configurations
// are handed in, and what a stream carries is opaque. The relay's side of a
// session lives in package relay.
//
// All exported types may be used by several goroutines at once unless their
// documentation says otherwise.
package securelink
