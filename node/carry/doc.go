// Package carry makes the containers of a node what the controller wants of
// them: it keeps what is desired on disk, compares it with what is, and
// repairs, one placement at a time and each placement by itself, so that a
// container that hangs delays no other.
//
// It owns the containers that carry all three labels (workload, placement,
// generation: node/discovery names them) or have an adoption record; a release
// record outranks both. Nothing else is changed or removed. It does
// not watch readiness: package node does, and is told here which container of
// a workload counts.
//
// All methods of a Carrier may be called concurrently.
package carry
