// Package availability holds the end-to-end tests of the policy engine: real
// engines on hosts of their own, traffic through nginx all the time, every
// request classified.
package availability
