# make demo   install what the demo needs, fetch the model, run the demo
# make test   install everything, fetch the model, run all tests
#
# On a machine without an NVIDIA GPU, TORCH_INDEX_URL saves a few gigabytes:
#   make demo TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
TORCH_INDEX_URL ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo serve test check bench bench-kv score format install dev model lock clean
help: ## list what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: install model ## run the demo; options in ARGS, e.g. ARGS="--once --json demo.json"
	$(BIN)/quaver demo $(ARGS)

serve: install model ## run the server
	$(BIN)/quaver serve $(ARGS)

test: dev model ## run all tests; options of pytest in ARGS
	$(BIN)/python -m pytest $(ARGS)

check: dev ## lint, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-bench model ## the engine beside llama.cpp and transformers; options in ARGS, e.g. ARGS="--quick"
	$(BIN)/python -m benchmarks.engine $(ARGS)

bench-kv: install model ## the KV tiers against computing everything again; options in ARGS, e.g. ARGS="--quick"
	$(BIN)/python -m benchmarks.kv_tiers $(ARGS)

score: dev model ## strike the model with every fault and write score.html and score.json; options in ARGS, e.g. ARGS="--quick"
	$(BIN)/quaver chaos score --html score.html --json score.json $(ARGS)

format: dev ## format and apply the safe mends
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

model: install
	$(BIN)/quaver model pull

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Quaver needs Python 3.11 or newer: apt-get install python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends python3-venv >/dev/null; } || { \
		echo "Python's venv module is missing: sudo apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: requirements.lock | $(BIN)/python
	$(PIP) install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$$(grep '^torch==' requirements.lock)"
	@touch $@

$(VENV)/.installed: pyproject.toml requirements.lock $(VENV)/.torch
	$(PIP) install --quiet -c requirements.lock -e '.[dashboard,chaos,load]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --quiet -c requirements.lock -e '.[dashboard,chaos,load,dev]'
	@touch $@

# GCC 12 drops the stores that fill AMX's tile configuration, as its header says that only eight bytes are
# read; llama.cpp then dies of an illegal instruction. Without that one optimisation it is right, and as fast.
$(VENV)/.installed-bench: pyproject.toml requirements.lock $(VENV)/.installed-dev
	@$(BIN)/python -c 'import llama_cpp' 2>/dev/null || { \
		command -v c++ >/dev/null || { echo "llama.cpp is built from source: apt-get install g++ first" >&2; exit 1; }; \
		echo "building llama.cpp for this machine: about ten minutes, once (pip keeps the wheel)"; }
	CXXFLAGS="$$CXXFLAGS -fno-dse -fno-tree-dse" $(PIP) install --quiet -c requirements.lock -e '.[bench]'
	@touch $@

lock: dev ## write requirements.lock from the environment
	$(PIP) freeze --exclude-editable | sed -n 's/^\([A-Za-z0-9._-]*==[^+ ]*\).*/\1/p' | grep -v '^nvidia' > requirements.lock

clean: ## remove the environment and what tests left
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
