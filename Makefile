# Every target works alone from a fresh clone: it makes .venv first. `make PYTHON=python3.12` chooses another Python.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest

# One cache for all that a run compiles: kernels that several tests share are built once.
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/build/inductor
export TRITON_CACHE_DIR := $(CURDIR)/build/triton
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help install demo test test-quick test-newest test-oldest test-wheel lint docs figures sweep sweep-beyond bench clean

help:
	@echo "make demo    schedule, verify and train GPT-2, BERT and Llama beside their untouched twins"
	@echo "make test    lint, then the tests that CI runs"
	@echo "make test-quick  one case in five of each test, for daily work"
	@echo "make test-newest, make test-oldest   the same tests with the newest and the oldest releases: docs/versions.md"
	@echo "make test-wheel  the wheel, installed beside the newest releases, as a new user would"
	@echo "make lint    ruff, the floors of imports, mypy"
	@echo "make docs    the site, into build/site; fails on any warning"
	@echo "make sweep   the long tests, all others with every schedule replayed, every architecture: docs/coverage.md"
	@echo "make sweep-beyond  models of timm, diffusers and x-transformers: docs/beyond.md"
	@echo "make bench   dispatch, matching and scheduling times"
	@echo "make clean   remove .venv and what was compiled"

# torch comes first and alone, so that another build of it, such as a smaller one for the CPU, can be put there before.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf,dev,docs]'
	@touch $@

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python -m benchmarks.demo

# Tests start many processes: they find our sources compiled, even where the environment keeps Python from writing that.
test: lint
	$(BIN)/python -W ignore::SyntaxWarning -m compileall -q fused fxschedule schedule tests
	$(PYTEST) -m "not slow" -n $(JOBS) --dist worksteal --durations=60

test-quick: $(INSTALLED)
	$(PYTEST) -m "not slow" --quick -n $(JOBS) --dist worksteal

# Environments of their own, without constraints.txt; the results are rows of docs/versions.md.
test-newest test-oldest:
	$(PYTHON) -m tests.versions $(@:test-%=%) --jobs $(JOBS)

test-wheel:
	$(PYTHON) -m tests.versions.wheel

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/lint-imports
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html; to look at it: $(BIN)/python -m mkdocs serve"

# README's figures, from what the benchmarks wrote; tables of the site are made from the same files with it.
figures: $(INSTALLED)
	$(BIN)/python docs/tools/draw_numbers.py

sweep: $(INSTALLED)
	HYPOTHESIS_PROFILE=new $(PYTEST) -m slow -n $(JOBS) --dist worksteal
	REPLAY_RECIPES=1 $(PYTEST) -m "not slow" -n $(JOBS) --dist worksteal
	$(BIN)/python -m tests.sweep

sweep-beyond: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/libraries -r tests/sweep/libraries.txt
	PYTHONPATH=build/libraries $(PYTEST) -m slow tests/huggingface/test_quantized.py
	PYTHONPATH=build/libraries $(BIN)/python -m tests.sweep --beyond

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.dispatch
	$(BIN)/python -m benchmarks.matching
	$(BIN)/python -m benchmarks.compile_time

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
