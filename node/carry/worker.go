package carry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/opfield/availability/placement"
)

// errKind is the cause of a placement that this node cannot carry out.
var errKind = errors.New("this node cannot carry out the kind")

// worker works on one placement.
type worker struct {
	carrier  *Carrier
	workload string
	changed  chan struct{} // capacity 1: something else is desired
	happened chan struct{} // capacity 1: an event may concern it
	ended    chan struct{}
	stop     sync.Once

	// Owned by run.
	crash    crashes
	attempts int
	retry    time.Duration
	breaks   uint64 // of the event stream, until the last look

	mirrors errand // pushes into the internal registry
	fetches errand // pulls of the next version's image

	mu        sync.Mutex
	interrupt context.CancelFunc // guarded by mu; ends a pull for what is not desired any more
}

func newWorker(c *Carrier, workload string) *worker {
	return &worker{
		carrier: c, workload: workload, changed: make(chan struct{}, 1), happened: make(chan struct{}, 1),
		ended: make(chan struct{}), retry: retryFirst, interrupt: func() {},
	}
}

func (w *worker) end() { w.stop.Do(func() { close(w.ended) }) }

func (w *worker) desiredChanged() {
	w.mu.Lock()
	w.interrupt()
	w.mu.Unlock()
	poke(w.changed)
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// run works until ctx ends or nothing is desired any more.
func (w *worker) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	var mirrors sync.WaitGroup
	defer mirrors.Wait()
	defer cancel()
	go func() { // a call that hangs does not outlive what is desired
		select {
		case <-ctx.Done():
		case <-w.ended:
			cancel()
		}
	}()
	for {
		wait, settled := w.pass(ctx, &mirrors)
		timer := time.NewTimer(wait)
		events := w.happened
		if !settled {
			events = nil // our own attempts cause events: they must not undo the back-off
		}
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-w.changed:
			w.attempts, w.retry = 0, retryFirst
		case <-events:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// pass looks and repairs once. It returns when to look again, and whether an
// event may make that sooner.
func (w *worker) pass(ctx context.Context, mirrors *sync.WaitGroup) (time.Duration, bool) {
	select { // what happened before this look is seen by it
	case <-w.happened:
	default:
	}
	m := w.carrier.book.read(w.workload)
	if m.Desired == nil {
		return checkEvery, true
	}
	if breaks := w.carrier.breaks.Load(); breaks != w.breaks {
		// The engine may have ended every container when it went.
		w.breaks, w.crash.looked = breaks, false
	}
	t := &task{worker: w, want: *m.Desired, memory: m}
	wait, err := w.converge(ctx, t)
	if ctx.Err() != nil {
		return checkEvery, true
	}
	mirrored, mirrorErr := w.mirror(ctx, mirrors, t.want)
	fetched, fetchErr := w.prefetch(ctx, mirrors, t.want.Prefetch)
	t.refresh()
	w.carrier.tell(w.workload, func(s *sight) {
		o := &s.observed
		s.note = t.noted
		defer func() { s.repairing = s.repairing && !o.Done }()
		o.Revision = t.want.Revision
		o.Restarts = t.memory.Restarts
		o.Outside, o.OutsideNumber = t.memory.Outside, t.memory.OutsideNumber
		o.Crashes, o.Looping = len(w.crash.times), w.crash.looping
		o.PrefetchReady = fetched
		o.Mirrored = nil
		if mirrored {
			o.Mirrored = t.memory.Mirrored
		}
		o.Done = err == nil && wait == 0 && (t.want.Mirror == nil || mirrored)
		o.Fault = nil
		switch {
		case err != nil:
			o.Fault = w.fault(err)
		case mirrorErr != nil:
			o.Fault = mirrorErr
		case fetchErr != nil:
			o.Fault = fetchErr
		case w.crash.looping && wait > 0:
			o.Fault = &placement.Fault{Code: placement.CodeCrashLoop, Message: cmp.Or(t.noted, "it ends again and again"), Attempts: len(w.crash.times)}
		}
	})
	if err == nil {
		w.attempts, w.retry = 0, retryFirst
		if wait == 0 || wait > checkEvery {
			wait = checkEvery
		}
		return wait, true
	}
	w.carrier.config.Logger.Warn("placement not as desired, trying again", "placement", t.want.ID().String(), "want", string(t.want.Want),
		"generation", t.want.Generation, "attempts", w.attempts, "err", err)
	if f, ok := errors.AsType[*faulty](err); ok && f.final {
		return checkEvery, true
	}
	wait, w.retry = w.retry, min(2*w.retry, retryMost)
	return wait, false
}

func (w *worker) converge(ctx context.Context, t *task) (time.Duration, error) {
	k := w.carrier.kinds[t.want.Kind]
	if k == nil {
		return 0, final("AVAILABILITY_KIND_UNSUPPORTED", fmt.Errorf("%w %s: update the node agent", errKind, t.want.Kind))
	}
	return k.Converge(ctx, t)
}

// fault counts the attempts.
func (w *worker) fault(err error) *placement.Fault {
	w.attempts++
	return faultOf(err, placement.CodeContainerStart, w.attempts)
}

// mirror pushes what is asked for into the internal registry. An answer is for
// the record that asked: asked again, the same name may mean another image, and
// the registry may have dropped what was pushed.
func (w *worker) mirror(ctx context.Context, beside *sync.WaitGroup, want placement.Desired) (done bool, _ *placement.Fault) {
	m := w.carrier.book.read(w.workload)
	if want.Mirror == nil || m.MirroredAt == want.Revision && m.Mirror.Equal(want.Mirror) && m.Mirrored != nil {
		return want.Mirror != nil, nil
	}
	asked, revision := *want.Mirror, want.Revision
	// Asked for again under another revision: what failed before counts no more.
	of := fmt.Sprintf("%d %s %s %s", want.Revision, asked.Repository, asked.Source, asked.Platforms)
	return false, w.mirrors.run(ctx, beside, of, placement.CodeImageMirror, func(ctx context.Context) error {
		image, err := w.carrier.images.mirror(ctx, asked)
		if err != nil {
			return err
		}
		return w.carrier.book.write(w.workload, func(m *memory) { m.Mirror, m.Mirrored, m.MirroredAt = &asked, &image, revision })
	}, func() { poke(w.changed) })
}

// prefetch pulls the image of the next version, so that a copy is down for no
// longer than its start takes. It reports whether the image is there.
func (w *worker) prefetch(ctx context.Context, beside *sync.WaitGroup, image *placement.Image) (bool, *placement.Fault) {
	if image == nil {
		return false, nil
	}
	if ref, err := w.carrier.images.find(ctx, *image); err != nil {
		return false, faultOf(err, placement.CodeImagePull, 0)
	} else if ref != "" {
		return true, nil
	}
	asked := *image
	return false, w.fetches.run(ctx, beside, asked.Digest, placement.CodeImagePull, func(ctx context.Context) error {
		if _, err := w.carrier.images.pull(ctx, asked); err != nil {
			return err
		}
		return w.carrier.book.write(w.workload, func(m *memory) { m.pulled(asked) })
	}, func() { poke(w.changed) })
}

// pulling returns a context that ends when what is pulled may not be desired
// any more.
func (w *worker) pulling(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	w.mu.Lock()
	w.interrupt = cancel
	w.mu.Unlock()
	return ctx, func() {
		w.mu.Lock()
		w.interrupt = func() {}
		w.mu.Unlock()
		cancel()
	}
}

func clip(text string) string {
	const most = 1000
	if len(text) > most {
		return text[:most] + "…"
	}
	return text
}

// task is one look at one placement.
type task struct {
	worker *worker
	want   placement.Desired
	memory memory // as it is on disk
	noted  string // what is done about a copy that is not ready, for people
}

func (t *task) refresh() { t.memory = t.worker.carrier.book.read(t.worker.workload) }

// remember changes the memory, on disk before anything is done by it.
func (t *task) remember(edit func(*memory)) error {
	err := t.worker.carrier.book.write(t.worker.workload, edit)
	t.refresh()
	return err
}

// outside tells of a change that somebody made by hand and that is repaired.
func (t *task) outside(text string) error {
	t.worker.carrier.config.Logger.Warn("repairing a change from outside", "placement", t.want.ID().String(), "change", text)
	t.worker.carrier.metrics.outside.Inc()
	err := t.remember(func(m *memory) { m.Outside, m.OutsideNumber = text, m.OutsideNumber+1 })
	t.worker.carrier.tell(t.worker.workload, func(s *sight) {
		s.repairing = true
		s.observed.Outside, s.observed.OutsideNumber, s.observed.Done = t.memory.Outside, t.memory.OutsideNumber, false
	})
	return err
}

// count makes a container, or none, the one that counts.
func (t *task) count(id string, generation uint64) error {
	if t.memory.Current == id && t.memory.Generation == generation {
		return nil
	}
	err := t.remember(func(m *memory) { m.Current, m.Generation = id, generation })
	t.worker.carrier.config.Changed()
	return err
}

// show tells what was seen.
func (t *task) show(edit func(*placement.Observed)) {
	t.worker.carrier.tell(t.worker.workload, func(s *sight) { edit(&s.observed) })
}

// looked is show for the first answer to which container counts.
func (t *task) looked(edit func(*placement.Observed)) {
	t.worker.carrier.tell(t.worker.workload, func(s *sight) { s.looked = true; edit(&s.observed) })
}
