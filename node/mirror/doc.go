// Package mirror copies a multi-platform image from the registry that a node
// pulled it from into the internal registry (IMG-2). The digest of the index
// stays, and every node pulls its own platform.
//
// It has no credentials of anybody: what the source does not give to everyone
// is not copied. It does not trust the source. Everything is checked against
// the digest that the node's Docker has, sizes and numbers are bounded, and an
// address that only this host can reach is not asked because the source said
// so. Which digest is wanted, and what happens if it cannot be had, is decided
// by the caller.
//
// A Source is used by one goroutine at a time, a Target by several.
package mirror
