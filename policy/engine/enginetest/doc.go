// Package enginetest simulates Docker nodes for tests of the policy engine.
// They speak the real bus with identities of their own and carry out what is
// desired of them as a node agent does, on containers that exist only in
// memory. A test may kill them, cut them off and slow them down, and decides
// itself what the controller makes of their silence.
//
// Everything may be used by several goroutines at the same time.
package enginetest
