// Package policy decides what becomes of a highly available workload: where
// its placements are, when one is replaced, how a new version reaches every
// copy, and how it is stopped, moved back or given up again.
//
// It is pure: Decide takes the present time, the stored Document of one
// workload and the World around it, and returns the next Document; what nodes
// shall do follows from the document alone (Document.Desired). There are no
// steps to be repeated or forgotten: a controller that is killed at any moment
// reads the document again and goes on. Nothing here does I/O, starts a
// goroutine, reads a clock or depends on the order of a map.
//
// All types are values; one may be used concurrently as long as nobody writes
// to it.
package policy
