// Package apply brings a rendered generation into a running nginx: it writes
// the generation beside the old one, has nginx test it, swaps a symbolic link,
// reloads, and waits for the status socket to answer with the new generation.
// If it does not, the previous generation comes back.
//
// An Applier is used by one goroutine at a time; Running may be called
// concurrently. Schedule, which decides when to apply, is pure.
package apply
