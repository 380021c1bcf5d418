package daemon

import (
	"os"
	"runtime"
	"runtime/debug"
)

// garbagePercent lets the heap, which is a few megabytes, grow further before
// it is collected than Go's default of 100.
const garbagePercent = 400

// MovesBytes prepares the runtime of a process that moves bytes between
// sockets. Half of such work is the kernel's and is done on other CPUs anyway;
// with a thread for every CPU, Go wakes threads that find nothing to do. The
// variables GOMAXPROCS and GOGC overrule it.
func MovesBytes() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)/2))
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(garbagePercent)
	}
}
