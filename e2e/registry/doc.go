// Package registry holds the end-to-end tests of the internal registry: real
// engines push and pull through node doors, relays and the controller.
package registry
