// Package engine is the loop around package policy: it watches the nodes,
// decides with policy.Decide, stores the documents with compare-and-set, and
// makes the nodes' records and the members of routing follow from them.
//
// It never acts on its own: what nodes shall do is in the buckets before a
// node hears of it, and everything is compared and repaired again and again,
// so a controller that was killed at any moment goes on where it was. Several
// controllers may run; one of them leads, the others wait.
//
// An Engine may be used by several goroutines at the same time.
package engine
