//go:build !race

package ingress_test

// raceFactor is how much slower the race detector makes our own code.
const raceFactor = 1

// manyWorkloads is the size that is promised (RTE-8, EVT-4).
const manyWorkloads = 2000
