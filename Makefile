# make demo   a small cluster on this machine, under load, with one node cut off
# make test   everything: unit, golden, race, short fuzz, end to end (needs root)
# make check  the quick gates: format, vet, architecture, unit tests with -race
# make simulate  a million hours of policies under faults (HOURS=...)
# make bench  throughput and latency beside direct and HAProxy (needs root)
#
# On a bare Debian 12 the targets install what is missing from the distribution.

GO       ?= go
# A count: a duration fails now and then for nothing (go.dev/issue/75804).
FUZZTIME ?= 20000x
E2E      := ./e2e/...
HOURS    ?= 1000000
UNIT     = $(shell $(GO) list ./... | grep -v -e /e2e)
VERSION  := $(shell git describe --always --dirty 2>/dev/null || echo dev)

.PHONY: build setup demo test check unit fuzz simulate scale e2e bench fmt vet staticcheck clean

build:
	$(GO) build -trimpath -ldflags '-X main.version=$(VERSION)' -o bin/ ./cmd/...

setup:
	./e2e/install.sh

demo: setup build
	./bin/opfield demo $(if $(ONCE),--once)

test: setup fmt vet staticcheck unit fuzz simulate scale e2e

check: fmt vet staticcheck unit

unit:
	$(GO) test -race -timeout 10m $(UNIT)

# Every fuzz test of the module, each for FUZZTIME.
fuzz:
	@grep -rlE '^func Fuzz' --include='*_test.go' . | xargs -r -n1 dirname | sort -u | while read -r dir; do \
	  for name in $$(grep -hoE '^func Fuzz[A-Za-z0-9_]*' "$$dir"/*_test.go | cut -c6-); do \
	    echo "fuzz $$dir $$name"; \
	    $(GO) test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "$$dir" || exit 1; \
	  done; \
	done

# Fails with the seed, the invariant and its trace. Little memory is in use, so
# it may be collected rarely.
simulate:
	@GOGC=1600 OPFIELD_SIMULATE_HOURS=$(HOURS) $(GO) test -count=1 -v -timeout 30m -run '^TestSimulateLong$$' ./policy/simulate

# A thousand policies on fifty nodes; the unit tests run it smaller, because of
# the race detector. The store is in memory, if there is
# room: a disk would be measured instead.
scale:
	@dir=/tmp; [ "$$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 2000000 ] && dir=/dev/shm; \
	  TMPDIR=$$dir $(GO) test -count=1 -v -timeout 10m -run '^TestScale' ./policy/engine

# One package at a time: they share the cores. -v prints the figures. A test
# that fails prints the log of every daemon, so what failed is said once more
# at the end.
e2e:
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && \
	  { $(GO) test -v -count=1 -p 1 -timeout 60m $(E2E) 2>&1; echo $$? >"$$dir/code"; } | tee "$$dir/out"; \
	  [ "$$(cat "$$dir/code")" = 0 ] || { echo "---- what failed:"; \
	    grep -E -A 14 '^ *--- FAIL|Error Trace:|waited .* in vain|^panic: |\[build failed\]' "$$dir/out" | \
	      grep -v '"level":' | cut -c 1-600 | tail -n 150; exit 1; }

bench: setup
	OPFIELD_BENCH=1 $(GO) test -count=1 -v -timeout 60m -run '^TestBench' ./e2e/bench

fmt:
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "not formatted:"; echo "$$out"; exit 1; fi

vet:
	$(GO) vet ./...

# Pinned in go.mod as a tool; nothing is downloaded that go.sum does not name.
staticcheck:
	$(GO) tool staticcheck ./...

clean:
	rm -rf bin
