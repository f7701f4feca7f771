# Every target sets up what it needs: on a machine with only Python and pip, `make demo` is enough.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
READY := $(VENV)/.flatout-ready
NO_GPU := not gpu and not multi_gpu

.DEFAULT_GOAL := check
.PHONY: setup check fix lint test test-gpu demo bench bench-gpu bench-gpu-base bench-gpu-memory
.PHONY: chaos docs size

setup: $(READY)

$(READY): pyproject.toml constraints.txt .ci/make-venv
	@bash .ci/make-venv "$(PYTHON)" "$(VENV)"
	$(PY) -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[demo,dev,frameworks,test]'
	@touch $@

# Format, style, types, layers, spelling.
lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# Under two minutes: what to run before each commit.
check: lint
	@$(PY) -m compileall -q src benchmarks
	$(PY) -m pytest -q -m "$(NO_GPU) and not slow"

# Everything that needs no GPU: what measures nothing in two halves beside each other, then the rest.
test: lint
	@bash .ci/test "$(PY)" "$(NO_GPU)"

test-gpu: setup
	$(PY) -m pytest -q -m "gpu or multi_gpu"

fix: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: setup
	$(BIN)/flatout demo

bench: setup
	$(PY) -m benchmarks.run

# Products against cuBLAS, naive scripts tuned, the same under frameworks' defaults. With the machine's
# own Python, whose torch knows CUDA: nothing is installed, no network is needed.
bench-gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set compute

# flatout itself: measure, tune, overhead, A/A.
bench-gpu-base:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set base

# Predicted memory against the device's own counters.
bench-gpu-memory:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set memory

# The tests that kill, hang, starve and interrupt.
chaos: setup
	$(PY) -m pytest -q -m "$(NO_GPU) and chaos" tests

# Pages against code: every command, flag, technique and rule, every link, every runnable block.
docs: setup
	$(PY) -m pytest -q tests/test_docs.py

# Lines per folder, then the ten longest files.
size:
	@for folder in src/flatout/*/ tests docs scenarios benchmarks; do \
	  [ -d "$$folder" ] || continue; \
	  printf '%7d  %s\n' "$$(find "$$folder" -name '*.py' -o -name '*.md' | xargs -r cat | wc -l)" "$$folder"; \
	done
	@echo
	@find src -name '*.py' -exec wc -l {} + | sort -rn | sed -n '2,11p'
