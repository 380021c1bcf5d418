package carry

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/system"

	"github.com/opfield/availability/node/discovery"
	"github.com/opfield/availability/node/docker"
)

// events lets workers look as soon as something happened to their container
// or to any image. What it misses is found by the next regular look.
func (c *Carrier) events(ctx context.Context) error {
	for {
		if !c.await(ctx) {
			return ctx.Err()
		}
		now := time.Now()
		messages, errs := c.config.Engine.Events(ctx, events.ListOptions{
			Since: fmt.Sprintf("%d.%09d", now.Unix(), now.Nanosecond()),
			Filters: filters.NewArgs(
				filters.Arg("type", string(events.ContainerEventType)), filters.Arg("type", string(events.ImageEventType)),
				filters.Arg("event", "start"), filters.Arg("event", "kill"), filters.Arg("event", "die"), filters.Arg("event", "stop"),
				filters.Arg("event", "pause"), filters.Arg("event", "rename"), filters.Arg("event", "update"), filters.Arg("event", "destroy"),
				filters.Arg("event", "delete"), filters.Arg("event", "untag"), filters.Arg("event", "create"),
			),
		})
		c.retryAll() // what happened while nobody listened
	listen:
		for {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case m := <-messages:
				c.happened(m)
			case <-errs:
				c.breaks.Add(1)
				c.hands.forget()
				break listen
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(eventsRetry):
		}
	}
}

func (c *Carrier) happened(m events.Message) {
	c.facts.soon()
	if m.Type == events.ImageEventType {
		c.kickAll()
		return
	}
	workload := c.owner(m.Actor.ID)
	if workload == "" && m.Actor.Attributes[discovery.LabelPlacement] != "" {
		workload = m.Actor.Attributes[discovery.LabelWorkload]
	}
	if m.Action == events.ActionKill && workload != "" {
		switch docker.ParseSignal(m.Actor.Attributes["signal"]) {
		case syscall.SIGTERM, syscall.SIGKILL, syscall.SIGINT, syscall.SIGQUIT:
			c.hands.signalled(m.Actor.ID, time.Unix(0, m.TimeNano))
		}
	}
	if m.Action == events.ActionUpdate || m.Action == events.ActionDestroy {
		c.facts.forget(m.Actor.ID)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.workers[workload]; w != nil {
		poke(w.happened)
	}
}

// await waits until the engine answers.
func (c *Carrier) await(ctx context.Context) bool {
	for {
		_, err := within(ctx, listLimit, "ask Docker about the node", func(ctx context.Context) (system.Info, error) { return c.config.Engine.Info(ctx) })
		if err == nil {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(eventsRetry):
		}
	}
}

// retryAll ends every back-off: the engine is there.
func (c *Carrier) retryAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.workers {
		poke(w.changed)
	}
}

func (c *Carrier) kickAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.workers {
		poke(w.happened)
	}
}
