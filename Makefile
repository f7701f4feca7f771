# Every target sets up what it needs: on a machine with only Python and pip, `make demo` is enough.
PYTHON ?= python3
VENV ?= .venv
GPU_PYTHON ?= python3.12
GPU_STACK ?= ../gpu-stack
SET ?= product
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
READY := $(VENV)/.flatout-ready
DEMO_READY := $(VENV)/.flatout-demo-ready
NO_GPU := not gpu and not multi_gpu

.DEFAULT_GOAL := check
.PHONY: setup check fix lint test test-all test-measures test-gpu test-images demo bench bench-gpu
.PHONY: bench-gpu-right bench-gpu-numbers bench-gpu-product gpu-stack chaos docs size

setup: $(READY)

$(READY): pyproject.toml constraints.txt .ci/make-venv
	@bash .ci/make-venv "$(PYTHON)" "$(VENV)"
	$(PY) -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[demo,dev,frameworks,test]'
	@touch $@ $(DEMO_READY)

# What the demo needs and no more. `make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu` takes torch without CUDA.
$(DEMO_READY): pyproject.toml constraints.txt .ci/make-venv
	@bash .ci/make-venv "$(PYTHON)" "$(VENV)"
	$(PY) -m pip install --quiet --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --constraint constraints.txt --editable '.[demo]'
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

# Everything that needs no GPU, some two hours on two cores: before an issue is called resolved.
test-all: lint
	@bash .ci/test "$(PY)" test-all

# The part of it that looks at what was measured, some twenty minutes: with nothing else running.
test-measures: setup
	@bash .ci/test "$(PY)" measures

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

demo: $(DEMO_READY)
	$(BIN)/flatout demo

bench: setup
	$(PY) -m benchmarks.run

# On a machine with a GPU, with its own Python: nothing is installed, no network is needed. Each call takes some five
# minutes, writes its record after every stage and prints its table last: docs/gpu-plan.md.
# What is right or wrong, all at once: tests, memory, every technique, the guard, the commands.
bench-gpu-right:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set right

# GPT-2 tuned from a naive script.
bench-gpu-product:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set product

# Device times against a clock, the cost of listening, products against cuBLAS.
bench-gpu-numbers:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set numbers

# Any of the sets: make bench-gpu SET=resnet50
bench-gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.run_gpu --set $(SET)

# The GPU machine's Python, torch and Triton in a folder of their own: what of the above can be tried without a device.
gpu-stack:
	@bash .ci/gpu-stack "$(GPU_PYTHON)" "$(GPU_STACK)"

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
