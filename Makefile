# `make demo`, `make test` and the rest. Each first makes .venv from requirements.lock, once.
# Needs python3 >= 3.11 with pip, and make. Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS_VENV := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed
# keras_hub without all that it declares: tensorflow-text would bring TensorFlow's build for GPUs beside tensorflow-cpu.
KERAS_HUB := --no-deps keras-hub==0.32.0 kagglehub==1.0.3 kagglesdk==0.1.38 regex==2026.11.19 sentencepiece==0.2.3 tokenizers==0.23.3
PLAN_VENV := .venv-plan
PLAN_STAMP := $(PLAN_VENV)/.installed
ENGINES_VENV := .venv-engines
ENGINES_STAMP := $(ENGINES_VENV)/.installed
# Slurm and Open MPI, as Debian has them.
ENGINES_PACKAGES := slurm-wlm munge openmpi-bin
TORCHFT_VENV := .venv-torchft
TORCHFT_STAMP := $(TORCHFT_VENV)/.installed
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
DOCS_BUILD := build/docs
DOCS_PORT ?= 8000
# The GPU compiler loads without a GPU, and two processes may load the TPU compiler at once.
PLAN_ENV := JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
# The oldest Keras that is supported; requirements.lock has the newest.
OLDEST_KERAS := 3.12.0
KERAS_VENV := .venv-keras
KERAS_STAMP := $(KERAS_VENV)/.installed
# Both ends of what is supported: the locked versions, and the newest that pip gives. Where an interpreter has another name:
# make PYTHON_3_13=/path/to/python3.13 test-versions
LOCKED_VENV := .venv-3.11
LOCKED_STAMP := $(LOCKED_VENV)/.installed
NEWEST_VENV := .venv-3.13
NEWEST_STAMP := $(NEWEST_VENV)/.installed
# The next version of Keras.
NIGHTLY_VENV := .venv-keras-nightly
NIGHTLY_STAMP := $(NIGHTLY_VENV)/.installed
# Of several installations of pyenv the last; its shim `python3.13` works only if that version is selected.
pyenv = $(lastword $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python$(1)))
PYTHON_3_11 ?= $(or $(call pyenv,3.11),python3.11)
PYTHON_3_13 ?= $(or $(call pyenv,3.13),python3.13)
NEWEST := hatchling '.[keras,optax,flax,grain,files,checkpoint,orbax,summaries,ps,migrate,examples,test]'
VERSION_TESTS := tests/contract tests/parity tests/keras tests/checkpoint tests/tracing tests/ps/keras tests/ps/programs/test_row_parallel.py tests/ps/programs/test_lookups.py tests/ps/test_checkpoints.py tests/diagnostics tests/migrate/test_missing_names.py tests/migrate/test_tensorflow_code.py tests/test_jax_compat.py
# A Python that has jax with its CUDA plugin, Keras, hypothesis, pytest and pytest-timeout, in place of .venv-gpu: make GPU_PYTHON=python3 test-gpu
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/.installed
# The plugin of the locked jax, for drivers from 525 on.
GPU_JAX := 'jax[cuda12]' -c requirements.lock
GPU_PYTHON ?= $(GPU_VENV)/bin/python
# A file's tests stay together: many share programs that were compiled.
# In the order of their names: by their numbers of tests, the default, files with few long tests would come last.
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder
# Three for two cores: quick tests wait for processes during a quarter of their time, and the tests marked rest longer.
IN_THREE := -n 3 --dist loadfile --no-loadscope-reorder
CORE := build/core
QUICK := "not long and (quick or not rest)"
REST := "not long and rest and not quick"
LINTED := $(wildcard src tests examples benchmarks tools hatch_build.py docs/*.py docs/*/*.py)

# pyright's wrapper would otherwise ask the package index whether there is a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Each process of tests would compile all of them anew, for seven seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo seams test test-core test-beside test-ps test-launch test-migrate test-plan-quick test-testing test-whole test-rest test-long test-all test-keras test-versions test-gpu test-peers test-plan test-engines test-browser fuzz fuzz-simulation pages docs docs-serve lint format bench bench-growth bench-failures planted-faults clean

help:
	@echo "make demo       train a small classifier on several virtual devices (examples/digits.py)"
	@echo "make test       run the quick tests: promises, rules, one program of each kind with real processes; those of the core,"
	@echo "                then those beside it. Compiled programs are kept in build/programs (REPLICAX_CACHE_DIR=off: only for the run)"
	@echo "make test-core  run the quick tests of the core in $(CORE), a tree without the parts (tools/core_tree.py)"
	@echo "make test-beside  run the other quick tests, in one call, or in several: make test-ps test-launch test-migrate"
	@echo "                test-plan-quick test-testing test-whole (those of one part; those of the whole house)"
	@echo "make test-rest  run the other tests that a change must pass"
	@echo "make test-long  run all the tests, the long ones too, compiled as users' programs are"
	@echo "make test-all   run make test, make test-rest and make test-long"
	@echo "make test-keras run the tests of Keras with Keras $(OLDEST_KERAS), the oldest that is supported"
	@echo "make test-versions  run $(VERSION_TESTS) with Python 3.11 and the locked versions, and with"
	@echo "                Python 3.13 and the newest jax, Keras and orbax, and with a nightly build of Keras (keras-nightly.lock)"
	@echo "make test-gpu   run the tests of GPUs (tests/gpu), where there is a GPU"
	@echo "make test-peers run the tests with TensorFlow, torch, Hugging Face datasets and keras_hub (tests/peers)"
	@echo "make test-plan  run the tests of plans with the compilers for TPUs and GPUs (tests/plan)"
	@echo "make test-engines  run the tests on Slurm, Ray, Open MPI and manifests for Kubernetes (tests/engines); as root it installs"
	@echo "                Debian's packages of Slurm and Open MPI where they are missing"
	@echo "make test-browser  run the tests of the status page in headless Chromium (tests/in_browser); as root it installs Debian's"
	@echo "                package where no browser is installed"
	@echo "make fuzz       compare operations that mix rows on several devices with one device in float64 (an hour)"
	@echo "make fuzz-simulation  run 100,000 seeds of the simulated world (tests/simulation) on all cores; SEEDS=1000, or"
	@echo "                SEED=4 for one run with all that happens, SCENARIO=Survivors"
	@echo "make pages      fill the parts of pages that come from the code, and write the notebooks (docs/generate.py)"
	@echo "make docs       build the site into $(DOCS_BUILD)/html; warnings are errors"
	@echo "make docs-serve show it on http://127.0.0.1:$(DOCS_PORT)"
	@echo "make lint       check the format, lint, check the types, and how the files hang together"
	@echo "make format     format the code and fix what the linter can fix"
	@echo "make bench      run the benchmarks"
	@echo "make bench-growth  measure how costs grow with the work, beside the exponents that they may have (ONLY=rows,"
	@echo "                QUICK=1 without the largest sizes, WRITE=1 into the table of the docs)"
	@echo "make bench-failures  train while workers are killed, beside restarts, torchft and torchrun (an hour; ROUNDS=3, DURATION=60)"
	@echo "make seams      print how the files hang together, beside what it may come to"
	@echo "make planted-faults  plant small faults in rules of the core and of parameter servers, and run the quick tests that should"
	@echo "                find each (a quarter of an hour for the core; LIST=core or LIST=servers for one of the two)"
	@echo "make clean      remove the environments and everything that was built or cached"

demo: $(STAMP)
	@echo "demo: examples/digits.py"
	@$(BIN)/python examples/digits.py

# The core in its tree, then everything else in one call: each start of pytest costs a quarter of a minute.
test: $(STAMP)
	@$(MAKE) --no-print-directory test-core; core=$$?; $(MAKE) --no-print-directory test-beside && exit $$core

# The core stands alone: in its tree a test that needs a part fails. Compiled programs are kept where the other tests keep them.
test-core: export REPLICAX_CACHE_DIR ?= $(CURDIR)/build/programs
test-core: $(STAMP)
	@echo "test-core: the quick tests of the core in $(CORE), the tree without the parts"
	@$(BIN)/python tools/core_tree.py
	@cd $(CORE) && PYTHONPATH=$(CURDIR)/$(CORE)/src $(CURDIR)/$(BIN)/python -m pytest -q -m $(QUICK) $(IN_THREE)

test-beside: $(STAMP)
	@$(call test-quick,ps launch migrate plan testing whole)

test-ps test-launch test-migrate test-testing test-whole: test-%: $(STAMP)
	@$(call test-quick,$*)

test-plan-quick: $(STAMP)
	@$(call test-quick,plan)

# $(call test-quick,targets of tools/core_tree.py)
define test-quick
	echo "$@: the quick tests of $(1)"; \
	$(BIN)/python -m pytest -q -m $(QUICK) $(IN_THREE) $$($(BIN)/python tools/core_tree.py --tests $(1))
endef

test-rest: $(STAMP)
	@echo "test-rest: pytest, the tests marked rest, without those marked long, in three processes"
	@$(BIN)/python -m pytest -q -m $(REST) $(IN_THREE)

test-long: $(STAMP)
	@echo "test-long: pytest, all tests, in two processes"
	@$(BIN)/python -m pytest -q $(IN_TWO)

test-all: test test-rest test-long

test-keras: $(KERAS_STAMP)
	@echo "test-keras: pytest tests/keras tests/ps/keras with Keras $(OLDEST_KERAS), without the tests marked long, in two processes"
	@$(KERAS_VENV)/bin/python -m pytest -q -m "not long" $(IN_TWO) tests/keras tests/ps/keras

test-versions: $(LOCKED_STAMP) $(NEWEST_STAMP) $(NIGHTLY_STAMP)
	@$(call test-version,$(LOCKED_VENV))
	@$(call test-version,$(NEWEST_VENV))
	@$(call test-version,$(NIGHTLY_VENV))

# $(call test-version,environment)
define test-version
	echo "test-versions: pytest $(VERSION_TESTS), without the tests marked long, in two processes, with"; \
	$(1)/bin/python --version; \
	$(1)/bin/pip list --disable-pip-version-check --format=freeze | grep -E '^(jax|jaxlib|keras|keras-nightly|numpy|orbax-checkpoint|flax|optax|grain)=='; \
	$(1)/bin/python -m pytest -q -m "not long" $(IN_TWO) $(VERSION_TESTS)
endef

test-gpu:
	@if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then $(MAKE) --no-print-directory .test-gpu; \
	else echo "test-gpu: nvidia-smi finds no GPU here, so nothing was run"; fi

# Its processes share the GPUs: none takes most of a GPU's memory for itself.
.PHONY: .test-gpu
.test-gpu: $(if $(filter $(GPU_VENV)/%,$(GPU_PYTHON)),$(GPU_STAMP))
	@echo "test-gpu: pytest tests/gpu, on"
	@nvidia-smi -L
	@PYTHONPATH=src REPLICAX_TEST_PLATFORM=gpu XLA_PYTHON_CLIENT_PREALLOCATE=false $(GPU_PYTHON) -m pytest -q -rP tests/gpu

fuzz: $(STAMP)
	@echo "fuzz: tests/fuzz/table.py, operations that mix rows beside one device in float64 (an hour)"
	@$(BIN)/python tests/fuzz/table.py

fuzz-simulation: $(STAMP)
	@echo "fuzz-simulation: tests/simulation/fuzz.py, processes and a network on virtual time"
	@$(BIN)/python tests/simulation/fuzz.py $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SEED),--seed $(SEED)) $(if $(SCENARIO),--scenario $(SCENARIO))

test-peers: $(PEERS_STAMP)
	@echo "test-peers: pytest tests/peers"
	@$(PEERS_VENV)/bin/python -m pytest -q tests/peers

test-plan: $(PLAN_STAMP)
	@echo "test-plan: pytest tests/plan"
	@$(PLAN_ENV) $(PLAN_VENV)/bin/python -m pytest -q tests/plan

# Without root or apt the tests of Slurm and Open MPI are skipped, with the reason. One process: Ray's cluster is shared.
# kmock's plugin for pytest needs pytest-asyncio, which nothing here uses.
test-engines: $(ENGINES_STAMP)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $(ENGINES_PACKAGES) >/dev/null 2>&1; then \
	  echo "test-engines: apt-get install $(ENGINES_PACKAGES)"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(ENGINES_PACKAGES); } >/dev/null || \
	  echo "test-engines: apt-get failed; tests of what is missing are skipped"; fi
	@echo "test-engines: pytest tests/engines"
	@REPLICAX_TEST_ENGINES=1 $(ENGINES_VENV)/bin/python -m pytest -q -rs -p no:kmock tests/engines

# Without a browser they fail and say so. Pictures of the page: make test-browser REPLICAX_PICTURES=FOLDER
test-browser: $(STAMP)
	@if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null && \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "test-browser: apt-get install chromium"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } >/dev/null || \
	  echo "test-browser: apt-get failed"; fi
	@echo "test-browser: pytest tests/in_browser"
	@REPLICAX_TEST_BROWSER=1 $(BIN)/python -m pytest -q tests/in_browser

# Each cell of a notebook runs once: $(DOCS_BUILD)/notebooks keeps the outputs until the cells change.
docs: $(DOCS_STAMP)
	@echo "docs: sphinx-build docs $(DOCS_BUILD)/html"
	@$(DOCS_VENV)/bin/python -m sphinx -q -E -W --keep-going -d $(DOCS_BUILD)/doctrees docs $(DOCS_BUILD)/html
	@echo "docs: built $(DOCS_BUILD)/html/index.html; make docs-serve shows it"

# The parts of pages that come from the code, and the notebooks. A test fails if a page is not current.
pages: $(STAMP)
	@$(BIN)/python tools/public_stubs.py
	@$(BIN)/python docs/generate.py

docs-serve: docs
	@echo "docs-serve: http://127.0.0.1:$(DOCS_PORT), until Ctrl-C; another port: make DOCS_PORT=8001 docs-serve"
	@$(DOCS_VENV)/bin/python -m http.server --bind 127.0.0.1 --directory $(DOCS_BUILD)/html $(DOCS_PORT)

lint: $(STAMP)
	@echo "lint: ruff format --check, ruff check, pyright, tools/seams.py --limits"
	@$(BIN)/ruff format --check $(LINTED)
	@$(BIN)/ruff check --no-cache $(LINTED)
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/python tools/seams.py --limits

format: $(STAMP)
	@echo "format: ruff format, ruff check --fix"
	@$(BIN)/ruff format $(LINTED)
	@$(BIN)/ruff check --fix $(LINTED)

seams: $(STAMP)
	@$(BIN)/python tools/seams.py

bench: $(STAMP)
	@echo "bench: benchmarks/run.py"
	@$(BIN)/python benchmarks/run.py

bench-growth: $(STAMP)
	@echo "bench-growth: benchmarks/growth.py"
	@$(BIN)/python benchmarks/growth.py $(if $(ONLY),--only "$(ONLY)") $(if $(QUICK),--quick) $(if $(WRITE),--write)

bench-failures: $(STAMP) $(TORCHFT_STAMP)
	@echo "bench-failures: benchmarks/failures.py, kill -9 of a worker every 20 s"
	@$(BIN)/python benchmarks/failures.py --torchft $(TORCHFT_VENV)/bin/python $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(DURATION),--duration $(DURATION))

# Results are kept in build/faults until a fault, its file or its tests change.
# One list: make planted-faults LIST=servers. One fault: make planted-faults FAULT=NAME
planted-faults: $(STAMP)
	@echo "planted-faults: tools/planted_faults.py, two faults at a time"
	@$(BIN)/python tools/planted_faults.py $(if $(LIST),--list $(LIST)) $(if $(FAULT),--only $(FAULT))

clean:
	@echo "clean: removing the environments of this Makefile, build outputs and caches"
	@rm -rf $(VENV) $(KERAS_VENV) $(LOCKED_VENV) $(NEWEST_VENV) $(NIGHTLY_VENV) $(GPU_VENV) $(PEERS_VENV) $(PLAN_VENV) $(ENGINES_VENV) $(TORCHFT_VENV) $(DOCS_VENV) build dist .pytest_cache .ruff_cache .hypothesis
	@find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# $(call install,environment,what pip installs,packages besides or instead)
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "replicax needs Python 3.11 or newer, and '$(PYTHON)' is not: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "setup: installing $(strip $(2:-r=)) into $(1) (a few minutes, the first time)"
	@$(PYTHON) -m venv $(1)
	@$(1)/bin/pip install -q --disable-pip-version-check $(2)
	$(if $(3),@$(1)/bin/pip install -q --disable-pip-version-check $(3))
	@$(1)/bin/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
endef

$(STAMP): requirements.lock pyproject.toml
	$(call install,$(VENV),-r requirements.lock)

$(KERAS_STAMP): requirements.lock pyproject.toml
	$(call install,$(KERAS_VENV),-r requirements.lock,keras==$(OLDEST_KERAS))

$(LOCKED_STAMP): override PYTHON := $(PYTHON_3_11)
$(LOCKED_STAMP): requirements.lock pyproject.toml
	$(call install,$(LOCKED_VENV),-r requirements.lock)

$(NEWEST_STAMP): override PYTHON := $(PYTHON_3_13)
$(NEWEST_STAMP): pyproject.toml
	$(call install,$(NEWEST_VENV),$(NEWEST))

$(NIGHTLY_STAMP): override PYTHON := $(PYTHON_3_11)
$(NIGHTLY_STAMP): keras-nightly.lock requirements.lock pyproject.toml
	$(call install,$(NIGHTLY_VENV),-r keras-nightly.lock)

$(GPU_STAMP): requirements.lock pyproject.toml
	$(call install,$(GPU_VENV),-r requirements.lock,$(GPU_JAX))

$(PEERS_STAMP): peers.lock pyproject.toml
	$(call install,$(PEERS_VENV),-r peers.lock,$(KERAS_HUB))

$(PLAN_STAMP): plan.lock requirements.lock pyproject.toml
	$(call install,$(PLAN_VENV),-r plan.lock)

$(ENGINES_STAMP): engines.lock requirements.lock pyproject.toml
	$(call install,$(ENGINES_VENV),-r engines.lock)

$(DOCS_STAMP): docs.lock requirements.lock pyproject.toml
	$(call install,$(DOCS_VENV),-r docs.lock)

# Without replicax: its processes only stand beside ours.
$(TORCHFT_STAMP): torchft.lock
	@echo "setup: installing torchft.lock into $(TORCHFT_VENV) (a few minutes, the first time)"
	@$(PYTHON) -m venv $(TORCHFT_VENV)
	@$(TORCHFT_VENV)/bin/pip install -q --disable-pip-version-check -r torchft.lock
	@touch $@
