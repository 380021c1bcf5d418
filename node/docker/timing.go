package docker

import "time"

// Every time of the talk with the engine. A cause is visible in the snapshot
// as soon as its event is read; the slower paths repair what was missed.
const (
	inspectLimit = 5 * time.Second  // one inspect call (DESIGN: inspect 5 s)
	listLimit    = 10 * time.Second // one list call
	listEvery    = 30 * time.Second // repair of missed events
	listAfter    = time.Second      // of an event, for what only a list tells
	retryMin     = 100 * time.Millisecond
	retryMax     = time.Second // the engine is local: asking often costs nothing
	recheckAfter = time.Second // an inspect that failed, or a suspicion, is looked at again
	killedHold   = 5 * time.Second
	oomHold      = time.Second
	// A container that was asked to end and still runs after this is taken
	// back: it ignores the signal.
	forgetStopAfter = 15 * time.Minute
)
