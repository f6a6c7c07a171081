# Needs Python 3.11 or newer and nothing else: each target makes its own virtual environment.
#   make demo        raw GSM8K rows to a tuned model that survives a kill, in about ten minutes
#   make test        the whole test suite, on the CPU
#   make test-fast   without the tests that take over ten seconds
#   make check       what must hold before a commit: format, lint, types, generated files, tests
#   make generate    write the generated files      make fmt   format and fix what can be fixed

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One thread and one process a core; a file's tests share what they set up, so they stay together.
WORKERS ?= 2
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Torch goes first and by this version: everything here runs on the CPU, the suite is tested with
# it, and an index that offers CPU wheels of it saves gigabytes of CUDA libraries.
# `make TORCH=torch …` takes what your index has; a venv of your own is `make VENV=path …`.
TORCH ?= torch==2.13.0

.PHONY: demo test test-fast check generate fmt venv clean

demo: $(READY)
	$(BIN)/python scripts/demo.py

test: $(READY)
	$(PYTEST)

test-fast: $(READY)
	$(PYTEST) -m "not slow"

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/generate.py --check
	$(PYTEST)

generate: $(READY)
	$(BIN)/python scripts/generate.py

fmt: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

venv: $(READY)

clean:
	rm -rf build dist .demo .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@
