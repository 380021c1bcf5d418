// Package relay is the relay: it keeps a control session with every node,
// ingress node and controller, knows which links they registered, admits
// their data connections by one-time tokens, and joins pairs of them in the
// kernel. It never holds a key for what a stream carries.
//
// A Server may be used by several goroutines at once.
package relay
