# Every target sets up what it needs: on a machine with only Python and pip, `make demo` is enough.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
READY := $(VENV)/.flatout-ready
NO_GPU := not gpu and not multi_gpu

.DEFAULT_GOAL := check
.PHONY: setup check fix lint test test-all test-gpu test-images demo bench bench-gpu bench-gpu-resnet50
.PHONY: bench-gpu-vit bench-gpu-small bench-gpu-starved bench-gpu-gemm bench-gpu-peers bench-gpu-base
.PHONY: bench-gpu-memory chaos docs size

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

# Under two minutes: what to run before each commit. Starts no training.
check: lint
	@bash .ci/test "$(PY)" check

# Within twenty minutes: the quick tests and the slow ones marked `smoke`. What CI runs.
test: lint
	@bash .ci/test "$(PY)" test

# Everything that needs no GPU, under an hour: before an issue is called resolved.
test-all: lint
	@bash .ci/test "$(PY)" test-all

# What needs a GPU. With the machine's own Python, as `bench-gpu`: nothing is installed, and what its torch warns of
# (each version of something else) is shown instead of failing a test. Only files with such tests are read.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q -rs -W default --timeout 90 -m "gpu or multi_gpu" \
	  $$(grep -rlE 'mark\.(multi_)?gpu\b' tests --include='*.py')

# torchvision's transforms under the data techniques. Its wheel asks for the torch that knows CUDA, so it
# comes without what it asks for, and into a folder of its own: no other test finds it.
test-images: setup
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --constraint constraints.txt --target $(VENV)/images torchvision
	PYTHONPATH=$(VENV)/images $(PY) -m pytest -q -rs tests/data/test_torchvision.py

fix: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: setup
	$(BIN)/flatout demo

bench: setup
	$(PY) -m benchmarks.run

# GPT-2 tuned from a naive script. With the machine's own Python, whose torch
# knows CUDA: nothing is installed, no network is needed. Each of these takes less than nine minutes.
bench-gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set compute

# The same of ResNet-50.
bench-gpu-resnet50:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set resnet50

# The same of ViT-B/16.
bench-gpu-vit:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set vit

# The same of ResNet-18 on small images and of low-rank adapters.
bench-gpu-small:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set small

# A training that waits for photographs, tuned with every technique.
bench-gpu-starved:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set starved

# Our product against cuBLAS.
bench-gpu-gemm:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set gemm

# All of these scripts under frameworks' defaults.
bench-gpu-peers:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set peers

# flatout itself: measure, overhead, A/A.
bench-gpu-base:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set base

# Predicted memory against the device's own counters.
bench-gpu-memory:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set memory

# The tests that kill, hang, starve and interrupt.
chaos: setup
	$(PY) -m pytest -q -m "$(NO_GPU) and chaos" tests

# Pages against code: every command, flag, technique and rule, every link, every runnable block. Then the site, into
# build/site; a broken link fails it, and a page that no link leads to.
docs: setup
	$(PY) -m pytest -q tests/test_docs.py
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# What the source is like to read, in numbers; then lines per folder and the ten longest files.
size: setup
	@$(PY) -m benchmarks.structure
