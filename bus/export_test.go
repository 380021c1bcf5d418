package bus

import "time"

// ReadDesiredEvery sets how often FollowDesired reads the index, and every
// record. It is called before.
func (c *Conn) ReadDesiredEvery(index, whole time.Duration) {
	c.desired = desiredTiming{index, whole}
}
