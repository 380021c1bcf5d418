// Package node is the agent of a Docker node: it finds the placements on it
// (node/docker, node/discovery), keeps watch over their readiness, numbers and
// publishes their health events, and tells the accepting end of the secure
// links where a connection leads.
//
// Agent.Run owns the state. Target, Failed and Status may be called
// concurrently at any time.
package node
