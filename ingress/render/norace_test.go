//go:build !race

package render_test

// The sizes that are promised (RTE-8, RTE-11).
const (
	manyWorkloads = 2000
	manyRoutes    = 5000
)
