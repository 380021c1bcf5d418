// Package simulate runs the policy engine's decisions in a world of its own:
// seeded clusters whose nodes die, are cut off, answer late or not at all,
// whose Docker hangs, whose users change their mind at any moment and whose
// controller is killed between any two steps. The decisions are the product's
// own code; time is simulated. After every step the invariants are checked.
//
// A run is owned by one goroutine and depends on its Config alone: the same
// seed gives the same trace.
package simulate
