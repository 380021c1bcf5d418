// Package bus owns everything about NATS: the embedded server with its
// permissions, the connection, streams and buckets, and the messages on them.
//
// Two accounts keep writers apart. Everybody is in account OPFIELD, where the
// health events live. The buckets and node events live in account
// OPFIELD_STORE, into which only the controller's store identity can write;
// the others read them through imports. One account would not do: the
// acknowledgement of a publish goes to whatever reply subject the publisher
// names, with the server's own rights, and so a node could overwrite a key of
// a bucket without ever being allowed to publish there.
//
// Nobody but the controller has a right on the JetStream API except to read
// single streams by direct get; consumers are not used, because a consumer
// delivers to any subject its creator names.
//
// Conn, Store and Server may be used by several goroutines at the same time.
// Callbacks of one Follow call come from one goroutine.
package bus
