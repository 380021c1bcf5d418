package carry

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/opfield/availability/placement"
)

// errand is work beside a worker, tried again until it succeeds: moving a large
// image must not keep a crashed copy from being started. The zero value is
// ready.
type errand struct {
	mu      sync.Mutex
	running bool   // guarded by mu
	of      string // guarded by mu; what err and tries are about
	err     error  // guarded by mu; of the last attempt
	tries   int    // guarded by mu; that failed
}

// run begins an attempt unless one is at work, and returns why the last one
// failed. Something else to do begins with a clean record. Done is called after
// every attempt.
func (e *errand) run(ctx context.Context, group *sync.WaitGroup, of, code string, do func(context.Context) error, done func()) *placement.Fault {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.of != of {
		e.of, e.err, e.tries = of, nil, 0
	}
	var fault *placement.Fault
	if e.err != nil {
		fault = faultOf(e.err, code, e.tries)
	}
	if e.running {
		return fault
	}
	e.running = true
	tries := e.tries
	group.Go(func() {
		if tries > 0 { // the pause between attempts
			select {
			case <-ctx.Done():
			case <-time.After(min(retryFirst<<min(tries-1, 10), retryMost)):
			}
		}
		err := ctx.Err()
		if err == nil {
			err = do(ctx)
		}
		e.mu.Lock()
		e.running = false
		if e.of == of {
			e.err = err
			e.tries++
		}
		e.mu.Unlock()
		if ctx.Err() == nil {
			done()
		}
	})
	return fault
}

// faultOf shows an error; code is that of an error without one.
func faultOf(err error, code string, attempts int) *placement.Fault {
	f, ok := errors.AsType[*faulty](err)
	if !ok {
		f = &faulty{code: code, err: err}
	}
	return &placement.Fault{Code: f.code, Message: clip(err.Error()), Attempts: attempts, Final: f.final}
}
