// Package ingresstest holds what tests of the ingress node share: a CA, a
// test placement that speaks TLS 1.3 like a node, a stand-in for the link
// endpoints and a private nginx. It is imported by tests only.
package ingresstest
