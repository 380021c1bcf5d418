// Package ingress is the sidecar of an ingress node: it folds routes, health
// events and relay reports into a table, applies the orders of the table to
// the link endpoints at once, and brings nginx up to date behind them, with
// as few reloads as possible.
//
// It does not know how routes arrive, how links are dialled or how endpoints
// forward: those are the small interfaces Source, Endpoints and Prober.
// Inbox and Ingress.Status may be used concurrently; everything else belongs
// to Run.
package ingress
