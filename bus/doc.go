// Package bus owns everything about NATS: the embedded server with its
// permissions, the connection, streams and buckets, and the messages on them.
//
// Three accounts keep writers apart. Nodes and the controller are in OPFIELD,
// where the health events are stored. The buckets, node and audit events live in
// OPFIELD_STORE, into which only the controller's store identity can write.
// Ingress nodes, relays and subscribers are in OPFIELD_READ, where nothing is
// stored. What one needs of another account comes through imports. One account
// would not do: the acknowledgement of a publish and the answer to a read go
// to whatever reply subject the client names, with the server's own rights, so
// a client could overwrite a key of a bucket, or another node's event, without
// ever being allowed to publish there. What is left of that within OPFIELD,
// an acknowledgement on another node's subject, KeepPlacements repairs.
//
// Nobody but the controller has a right on the JetStream API except to read
// single streams by direct get; consumers are not used, because a consumer
// delivers to any subject its creator names.
//
// Conn, Store and Server may be used by several goroutines at the same time.
// Callbacks of one Follow call come from one goroutine.
package bus
