# `make demo`, `make test` and the rest. Each first makes .venv from requirements.lock, once.
# Needs python3 >= 3.11 with pip, and make. Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS_VENV := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed
PLAN_VENV := .venv-plan
PLAN_STAMP := $(PLAN_VENV)/.installed
# The GPU compiler loads without a GPU, and two processes may load the TPU compiler at once.
PLAN_ENV := JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
# The oldest Keras that is supported; requirements.lock has the newest.
OLDEST_KERAS := 3.12.0
KERAS_VENV := .venv-keras
KERAS_STAMP := $(KERAS_VENV)/.installed
# A file's tests stay together: many share programs that were compiled.
# In the order of their names: by their numbers of tests, the default, files with few long tests would come last.
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder
LINTED := $(wildcard src tests examples benchmarks)

# pyright's wrapper would otherwise ask the package index whether there is a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Each process of tests would compile all of them anew, for seven seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-keras test-peers test-plan lint format bench clean

help:
	@echo "make demo       train a small classifier on several virtual devices (examples/digits.py)"
	@echo "make test       run the tests, without the long ones"
	@echo "make test-long  run all the tests"
	@echo "make test-keras run the tests of Keras with Keras $(OLDEST_KERAS), the oldest that is supported"
	@echo "make test-peers run the tests with TensorFlow, torch and Hugging Face datasets (tests/peers)"
	@echo "make test-plan  run the tests of plans with the compilers for TPUs and GPUs (tests/plan)"
	@echo "make lint       check the format, lint, check the types"
	@echo "make format     format the code and fix what the linter can fix"
	@echo "make bench      run the benchmarks"
	@echo "make clean      remove .venv, .venv-keras, .venv-peers, .venv-plan and everything that was built or cached"

demo: $(STAMP)
	@echo "demo: examples/digits.py"
	@$(BIN)/python examples/digits.py

test: $(STAMP)
	@echo "test: pytest, without the tests marked long, in two processes"
	@$(BIN)/python -m pytest -q -m "not long" $(IN_TWO)

test-long: $(STAMP)
	@echo "test-long: pytest, all tests, in two processes"
	@$(BIN)/python -m pytest -q $(IN_TWO)

test-keras: $(KERAS_STAMP)
	@echo "test-keras: pytest tests/keras with Keras $(OLDEST_KERAS), without the tests marked long, in two processes"
	@$(KERAS_VENV)/bin/python -m pytest -q -m "not long" $(IN_TWO) tests/keras

test-peers: $(PEERS_STAMP)
	@echo "test-peers: pytest tests/peers"
	@$(PEERS_VENV)/bin/python -m pytest -q tests/peers

test-plan: $(PLAN_STAMP)
	@echo "test-plan: pytest tests/plan"
	@$(PLAN_ENV) $(PLAN_VENV)/bin/python -m pytest -q tests/plan

lint: $(STAMP)
	@echo "lint: ruff format --check, ruff check, pyright"
	@$(BIN)/ruff format --check $(LINTED)
	@$(BIN)/ruff check $(LINTED)
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	@echo "format: ruff format, ruff check --fix"
	@$(BIN)/ruff format $(LINTED)
	@$(BIN)/ruff check --fix $(LINTED)

bench: $(STAMP)
	@echo "bench: benchmarks/run.py"
	@$(BIN)/python benchmarks/run.py

clean:
	@echo "clean: removing .venv, .venv-keras, .venv-peers, .venv-plan, build outputs and caches"
	@rm -rf $(VENV) $(KERAS_VENV) $(PEERS_VENV) $(PLAN_VENV) build dist .pytest_cache .ruff_cache .hypothesis
	@find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# $(call install,environment,lock file,package instead of the locked one)
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "replicax needs Python 3.11 or newer, and '$(PYTHON)' is not: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "setup: installing $(2) into $(1) (a few minutes, the first time)"
	@$(PYTHON) -m venv $(1)
	@$(1)/bin/pip install -q --disable-pip-version-check -r $(2)
	$(if $(3),@$(1)/bin/pip install -q --disable-pip-version-check $(3))
	@$(1)/bin/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
endef

$(STAMP): requirements.lock pyproject.toml
	$(call install,$(VENV),requirements.lock)

$(KERAS_STAMP): requirements.lock pyproject.toml
	$(call install,$(KERAS_VENV),requirements.lock,keras==$(OLDEST_KERAS))

$(PEERS_STAMP): peers.lock pyproject.toml
	$(call install,$(PEERS_VENV),peers.lock)

$(PLAN_STAMP): plan.lock requirements.lock pyproject.toml
	$(call install,$(PLAN_VENV),plan.lock)
