// Package lab makes real hosts on one machine: network namespaces joined by a
// bridge, a Docker engine for each node, daemons that run inside them, and the
// verbs that break them (cut, loss, pause, kill).
//
// It owns everything it makes and removes it on Close, also what an earlier,
// killed process of this program left behind. It knows nothing about the
// product. It needs root and Linux. All methods may be called concurrently.
//
// Several environments may exist at the same time, also with the same
// addresses: nothing of them is visible outside their own namespaces.
package lab
