package simulate_test

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/opfield/availability/policy/simulate"
)

var replay = flag.Bool("replay", false, "print the trace of the run with the seed of -seed")

// A failing seed is replayed with
//
//	go test -run Replay -replay -args <seed> <hours> ./policy/simulate
func TestReplay(t *testing.T) {
	if !*replay {
		return
	}
	var seed, hours int
	if _, err := fmt.Sscan(flag.Arg(0)+" "+flag.Arg(1), &seed, &hours); err != nil {
		t.Fatalf("give the seed and the hours after -args: %v", err)
	}
	c := config(uint64(seed), time.Duration(hours)*time.Hour)
	c.Trace = func(line string) { fmt.Println(line) }
	if r := simulate.Run(c); r.Broken != nil {
		t.Fatal(r.Broken)
	}
}
