//go:build !race

package engine_test

// The size that is promised.
const (
	manyPolicies = 1000
	manyNodes    = 50
	measured     = true
)
