# The one front door. `make demo` and `make test` set everything up by themselves.
#   setup build demo test test-san build-san test-compat compat-venv compat-all test-gpu gpu-bundle test-all soak sim bench incidents compatibility lint lint-all format clean

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

TORCH ?= 2.15.0
TORCH_COMPAT ?= 2.11.0
JOBS ?= $(shell nproc)
SEEDS ?= 2000
BENCH ?=
VENV := .venv
PYTHON := $(VENV)/bin/python
PYTEST := $(PYTHON) -m pytest -q --durations=40 --durations-min=3
CTEST := ctest --output-on-failure --no-tests=error -j $(JOBS)
export CCACHE_DIR ?= $(HOME)/.cache/ccache
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

.PHONY: help setup build demo test test-san build-san test-compat compat-venv compat-all test-gpu gpu-bundle test-all soak sim bench incidents compatibility lint lint-all format clean

help:
	@sed -n '1,3s/^# \{0,2\}//p' Makefile

# ---- set-up -------------------------------------------------------------------------------------

setup: build

packages-%:
	@./setup.sh packages $*

$(VENV)/.ready: setup.sh | packages-build
	@./setup.sh venv $(VENV) $(TORCH) all
	@touch $@

# Everything is configured and built by the Python build (scikit-build-core), in build/, so that the package, the
# C++ tests and build/bin/resilient-store come from one tree.
build: packages-build $(VENV)/.ready
	@tests/build.sh $(VENV) build

# ---- running ------------------------------------------------------------------------------------

demo: build
	@$(PYTHON) docs/examples/demo.py

test: packages-model build
	@$(CTEST) --test-dir build -LE fuzz
	@$(PYTEST) tests -m "not slow and not soak"

test-all: test test-compat
	@build/bin/store_sim --seeds=$(SEEDS)
	@$(PYTEST) tests -m "slow"

# Unit, simulator and fuzz targets under AddressSanitizer + UBSan, then ThreadSanitizer. Two more at a time than there are
# processors, as many of them wait.
test-san: build-san
	@for preset in asan tsan fuzz; do $(CTEST) -j $$(($(JOBS) + 2)) --preset $$preset; done

build-san: packages-build packages-fuzz
	@for preset in asan tsan fuzz; do cmake --preset $$preset >/dev/null; cmake --build --preset $$preset -j $(JOBS); done

test-compat: packages-build
	@tests/compat.sh $(TORCH_COMPAT)

compat-venv: packages-build
	@./setup.sh venv .venv-torch-$(TORCH_COMPAT) $(TORCH_COMPAT)

# Against every supported minor of torch, one after another: 6 GB of disk, and minutes for each.
compat-all: packages-build
	@tests/compat_all.sh

test-gpu: build
	@tests/gpu/run.sh

# For a GPU machine without a network; see tests/gpu/build.sh.
gpu-bundle:
	@tests/gpu/bundle.sh build/gpu_bundle.tar.gz

soak: build
	@tests/soak.sh $(PYTHON) $(PARTS)

sim: build
	@build/bin/store_sim --seeds=$(SEEDS)

bench: packages-bench build
	@$(PYTHON) benchmarks/detect_bench.py --out benchmarks/results/detect.json
	@$(PYTHON) benchmarks/detect_bench.py --memory 0.1 4 8 --out benchmarks/results/detect_memory.json
	@$(PYTHON) benchmarks/store_bench.py $(BENCH) --out benchmarks/results/store.json
	@$(PYTHON) benchmarks/neighbour_bench.py --out benchmarks/results/neighbour.json
	@$(PYTHON) benchmarks/collective_bench.py $(BENCH) --out benchmarks/results/collectives.json
	@/usr/bin/python3 benchmarks/collective_plot.py benchmarks/results/collectives.{json,svg}
	@build/bin/nccl_submit_bench | tee benchmarks/results/nccl_submit.json
	@$(PYTHON) benchmarks/recovery_bench.py --out benchmarks/results/recovery.json
	@/usr/bin/python3 benchmarks/recovery_plot.py benchmarks/results/recovery.{json,svg}
	@./setup.sh bench_venv $(VENV)
	@$(PYTHON) benchmarks/recovery_bench.py --form torchft --form torchft-quick --form replacement --form shrink --kills 12 \
		--bound 40 --form-seconds 230 --out benchmarks/results/recovery_torchft.json
	@$(PYTHON) benchmarks/tcpstore_bench.py $(BENCH) --out benchmarks/results/tcpstore.json

incidents: build
	@$(PYTHON) benchmarks/incidents.py --out benchmarks/results/incidents.json --page docs/incidents.md

compatibility: build
	@$(PYTHON) benchmarks/compatibility.py --out benchmarks/results/compatibility.json --page docs/compatibility.md

lint: packages-build packages-lint $(VENV)/.ready build
	@RUFF=$(VENV)/bin/ruff CLANG_TIDY=$(VENV)/bin/clang-tidy tests/lint.sh build

# clang-tidy on every source, and the content on which it passed on record: `make lint` looks at what differs from that.
lint-all: packages-lint $(VENV)/.ready build
	@RUFF=$(VENV)/bin/ruff CLANG_TIDY=$(VENV)/bin/clang-tidy tests/lint.sh build all
	@python3 tests/affected.py record

format: packages-lint $(VENV)/.ready
	@git ls-files '*.h' '*.cc' | xargs clang-format-14 -i
	@$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

clean:
	@rm -rf build build-* .venv-*
