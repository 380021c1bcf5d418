// Package placement holds the vocabulary that every part shares: the ids of
// workloads, nodes, placements and links, the placement health event with its
// CloudEvents encoding, and the order in which one event overrides another.
//
// It is pure: no I/O, no clock, no goroutines. All types are values; a value
// may be used concurrently as long as nobody writes to it.
package placement
