//go:build race

package ingress_test

// raceFactor is how much slower the race detector makes our own code.
const raceFactor = 10

// The race detector makes the lexer of nginx-go-crossplane, which passes every
// token through a channel, some twenty times slower: the tests of size are
// smaller then.
const manyWorkloads = 500
