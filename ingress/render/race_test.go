//go:build race

package render_test

// The race detector makes the lexer of nginx-go-crossplane, which passes every
// token through a channel, some twenty times slower: the tests of size are
// smaller then.
const (
	manyWorkloads = 300
	manyRoutes    = 1000
)
