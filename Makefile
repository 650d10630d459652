# What a newcomer needs is `make run` and `make test`. Everything that is built goes
# to build/.

VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -X main.version=$(VERSION)

# go-nvml's header declares what NVIDIA has deprecated.
export CGO_CFLAGS := -O2 -g -Wno-deprecated-declarations

.PHONY: help run demo test soak bench lint build generate clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

run: ## run a placement server and two simulated GPU machines with sample tasks, and show them live; Ctrl-C takes all of it away
	@scripts/setup
	@$(MAKE) --no-print-directory build
	@scripts/run

demo: ## without a person: tasks, a GPU that fails for good, its machine replaced; each step is checked, the exit code says how it went
	@scripts/setup
	@$(MAKE) --no-print-directory build
	@scripts/demo

test: ## run every test under the race detector, and say what was skipped and why
	@scripts/setup
	@scripts/setup oracle
	@scripts/test

soak: ## berth under fire for an hour or more: 1000 moments, its programs under the race detector
	@scripts/setup
	BERTH_FIRE_RACE=1 BERTH_FIRE_MOMENTS=1000 go test -race -count=1 -timeout 4h -run 'TestUnderFire$$' -v ./cmd/berth

bench: ## measure, and write docs/performance.md
	@scripts/setup
	@$(MAKE) --no-print-directory build
	@scripts/bench

lint: ## gofmt, go vet, staticcheck
	@scripts/lint

# The go command knows best what is up to date.
build: ## build berth, berth-agent and the simulators into build/
	@mkdir -p build/sim
	CGO_ENABLED=0 go build -trimpath -ldflags "$(LDFLAGS)" -o build/berth ./cmd/berth
	CGO_ENABLED=1 go build -trimpath -ldflags "$(LDFLAGS)" -o build/berth-agent ./cmd/berth-agent
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o build/sim/mpssim ./mps/mpssim/program
	build/berth sim library --header "$$(go list -m -f '{{.Dir}}' github.com/NVIDIA/go-nvml)/pkg/nvml" build/sim/libnvidia-ml.so.1

generate: ## make the Go of api/agentpb/agent.proto again; needs protoc
	@scripts/generate

clean: ## remove build/ (not while make run is up: it takes its things away itself)
	@rm -rf build 2>/dev/null || sudo rm -rf build
