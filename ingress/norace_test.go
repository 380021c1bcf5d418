//go:build !race

package ingress_test

// raceFactor is how much slower the race detector makes our own code.
const raceFactor = 1
