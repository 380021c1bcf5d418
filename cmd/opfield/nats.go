package main

import (
	"fmt"

	"github.com/opfield/availability/bus"
)

type natsCmd struct {
	Config natsConfigCmd `cmd:"" help:"Print the accounts and users that an own nats-server needs."`
}

type natsConfigCmd struct{}

func (natsConfigCmd) Run(s *session) error {
	members, err := members(s)
	if err != nil {
		return err
	}
	text, err := bus.ExternalConfig(members)
	if err != nil {
		return err
	}
	s.say("print it again and reload nats-server after every join and revocation")
	_, err = fmt.Fprint(s.out, text)
	return err
}
