# Two commands for a newcomer: `make demo` and `make test`. Each sets everything up by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One process per core: three on two cores took 24 min instead of 20.
JOBS ?= 2
# The processes share the cores: idle OpenMP threads must sleep, not spin.
export OMP_WAIT_POLICY := PASSIVE
# The tests start some hundred processes: without cached bytecode each compiles the package again, 0.3 to 0.8 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-quick test-full test-triton test-peers test-gpu check format tables api clean
help:
	@echo "make demo       train a tokenizer and a model on the standard library, fine-tune it, write a report"
	@echo "make test       every test that needs no GPU (Triton kernels through the interpreter)"
	@echo "make test-quick  a part of them for every change: configuration, data, model, command line; minutes on two cores"
	@echo "make test-full  the same with every tuning, every mutant, and today's Triton"
	@echo "make test-triton  the op conformance, and how launches are repeated, on another Triton: TRITON=3.9.0"
	@echo "make test-peers  heavy peers in an environment of their own: a schema fuzzer, JSON Schema's suite, an agent SDK, PEFT, ..."
	@echo "make test-gpu   the tests on a CUDA device, kernels compiled"
	@echo "make check      format, lint, types, import direction, public names, generated tables"
	@echo "make api        the API reference from docstrings, in build/api"

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# A fault that doctor finds, such as a hidden or hot GPU, is for the reader: the demo runs without a GPU too.
demo: $(VENV)/ready
	-$(BIN)/bagu doctor --no-measure
	$(BIN)/bagu demo

test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not slow"

# What a change most often breaks, without servers, engines, whole training runs, and the tests that mostly start processes.
PROCESSES := $(addprefix tests/test_,wheel.py examples.py api_reference.py cli_speed.py)
test-quick: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not slow" \
		$(filter-out $(PROCESSES),$(wildcard tests/test_*.py)) tests/data tests/nn/test_model.py tests/train/test_step.py tests/eval tests/runs

test-full: $(VENV)/ready test-triton
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu"

# The kernels on today's Triton, beside the one that is pinned; its interpreter is the judge.
TRITON ?= 3.9.0
test-triton: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --no-deps --target .triton/$(TRITON) triton==$(TRITON)
	PYTHONPATH=.triton/$(TRITON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) \
		tests/ops/test_conformance.py tests/ops/test_replay*.py

# Programs that judge bagu and are too heavy for the environment that develops it. Not part of CI.
PEERS := .venv-peers
$(PEERS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[peers]'
	# the source package of jsonschema has the test suite of JSON Schema
	$(PEERS)/bin/python -m pip download --quiet --no-deps --no-binary jsonschema --dest $(PEERS)/source --constraint constraints.txt jsonschema
	mkdir -p $(PEERS)/json-schema-suite
	tar xzf $(PEERS)/source/jsonschema-*.tar.gz -C $(PEERS)/json-schema-suite --strip-components=1
	@touch $@

test-peers: $(PEERS)/ready
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m pytest tests/peers

# On a GPU machine the environment is the machine's own: its torch and Triton are the ones to test. Compiling the kernels
# of every case takes 45 minutes of one core, so with pytest-xdist it takes them all.
test-gpu:
	OMP_NUM_THREADS=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 $(PYTHON) -m pytest $$($(PYTHON) -c "import xdist" 2>/dev/null && printf "%s" "-n auto") -m "not slow" tests/ops tests/train/test_step.py tests/train/test_fp8.py tests/train/test_checkpoint.py tests/train/test_resume.py tests/bench/test_tune_gpu.py $(wildcard tests/serve/test_*_gpu.py) tests/recipes/test_rollout_gpu.py tests/recipes/test_dpo.py::test_dpo_learns_separable_pairs_in_bf16_on_a_gpu
	$(PYTHON) -m pytest tests/machine/test_timing.py  # alone: sixteen processes on one GPU spoil any clock

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py tests/test_public_names.py
	$(BIN)/python -m benchmarks.tools.tables --check
	$(BIN)/python -m benchmarks.tools.settings --check

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

tables: $(VENV)/ready
	$(BIN)/python -m benchmarks.tools.tables
	$(BIN)/python -m benchmarks.tools.settings
	$(BIN)/python -m benchmarks.tools.architecture
	$(BIN)/python -m benchmarks.tools.chart

api: $(VENV)/ready
	$(BIN)/python -m benchmarks.tools.api

clean:
	rm -rf $(VENV) $(PEERS) .mypy_cache .pytest_cache .ruff_cache .hypothesis
