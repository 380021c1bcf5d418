//go:build race

package engine_test

// The race detector makes everything many times slower: the test of size is
// smaller then, and measures nothing.
const (
	manyPolicies = 100
	manyNodes    = 10
	measured     = false
)
