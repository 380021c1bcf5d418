package node

import "time"

// Every time of the agent. From a cause to its event: the engine's event or
// one probe (probeEvery + probeLimit of a port that is not ready), then no
// waiting; RDY-3 allows 100 ms.
const (
	probeEvery   = 100 * time.Millisecond // while not ready
	probeFastFor = 10 * time.Second       // after it the wait doubles up to probeSlow
	probeSlow    = 2 * time.Second
	probeReady   = 5 * time.Second // while ready; a failed dial is looked at at once
	probeLimit   = time.Second     // of one connection attempt
	// A ready port that does not answer in time may only be busy: so many
	// attempts in a row make it not ready. A refusal does at once.
	probeTimeouts = 3

	publishLimit   = 5 * time.Second // one attempt
	publishRetry   = 100 * time.Millisecond
	publishRetries = 500 * time.Millisecond // the longest wait between attempts
	republishEvery = 5 * time.Minute        // repairs a store that lost its content

	certificateRetry   = time.Second
	certificateRetries = 30 * time.Second
	certificateLimit   = 10 * time.Second
)
