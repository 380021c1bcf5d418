// Package api is the controller's interface for people and programs: HTTP and
// JSON over a unix socket that only root can use, errors as RFC 9457 problem
// documents, and the view of the whole fleet behind it.
//
// It does not know what a route means; the checker comes in through Config.
// It owns no state of its own: routes and certificates are in the buckets,
// identities in the CA, and the fleet is what processes tell about themselves.
//
// Server and Fleet may be used by several goroutines at the same time.
package api
