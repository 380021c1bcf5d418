package simulate

import (
	"container/heap"
	"time"
)

// event is something that happens at a time; those of the same time happen in
// the order they were made.
type event struct {
	at    time.Time
	order uint64
	do    func()
}

type agenda []event

func (a agenda) Len() int { return len(a) }
func (a agenda) Less(i, j int) bool {
	if a[i].at.Equal(a[j].at) {
		return a[i].order < a[j].order
	}
	return a[i].at.Before(a[j].at)
}
func (a agenda) Swap(i, j int) { a[i], a[j] = a[j], a[i] }
func (a *agenda) Push(x any)   { *a = append(*a, x.(event)) }
func (a *agenda) Pop() any {
	old := *a
	last := old[len(old)-1]
	old[len(old)-1] = event{}
	*a = old[:len(old)-1]
	return last
}

// clock is the simulated time with what is going to happen.
type clock struct {
	now    time.Time
	agenda agenda
	order  uint64
}

func (c *clock) after(d time.Duration, do func()) { c.at(c.now.Add(d), do) }

func (c *clock) at(t time.Time, do func()) {
	if t.Before(c.now) {
		t = c.now
	}
	c.order++
	heap.Push(&c.agenda, event{t, c.order, do})
}

// next makes the next thing happen; false: nothing is left before the end.
func (c *clock) next(end time.Time) bool {
	if len(c.agenda) == 0 || c.agenda[0].at.After(end) {
		c.now = end
		return false
	}
	e := heap.Pop(&c.agenda).(event)
	c.now = e.at
	e.do()
	return true
}
