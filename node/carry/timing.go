package carry

import "time"

// Every time of carrying out. A call that takes longer than its limit makes
// the placement busy, never failed.
const (
	inspectLimit = 5 * time.Second
	listLimit    = 10 * time.Second
	changeLimit  = 30 * time.Second // create, start, rename, update, networks
	removeLimit  = 30 * time.Second
	stopDefault  = 10 * time.Second // Docker's own
	stopExtra    = 10 * time.Second // beyond the container's stop timeout
	offerLimit   = 5 * time.Second  // what an image has where it came from: people wait
	stallLimit   = 60 * time.Second // of a pull or push without progress

	checkEvery = 30 * time.Second // repairs what no event told
	retryFirst = time.Second
	retryMost  = 30 * time.Second

	// A copy that ends by itself is started after 0, 1, 2, 4 … seconds. A run
	// of crashStable ends the count; crashLoop ends within it are a loop.
	crashFirst  = time.Second
	crashMost   = 60 * time.Second
	crashStable = 2 * time.Minute
	crashLoop   = 5

	pruneEvery = 10 * time.Minute // images that are not needed any more
	pruneAfter = time.Hour        // the image was desired, or the node had a placement, last

	factsAfter = time.Second     // of an event
	statsEvery = 5 * time.Minute // the use of a container without limits
	// handHold is how long a signal from outside explains an end.
	handHold = 5 * time.Minute
	// eventsRetry is the wait before the event stream is opened again.
	eventsRetry = time.Second
)
