// Package upstream decides where traffic goes: it folds routes, placement
// health events, the loss of nodes and what the relays see into one table,
// and says which links are open, joined, holding or closed, and what nginx
// should list for every workload port.
//
// It is pure: no I/O, no clock, no goroutines, and no result depends on the
// order of a map. A Table is owned by one goroutine; the other types are
// values.
package upstream
