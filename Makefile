# Needs only Python 3.11 or newer: everything else goes into .venv.
#   make quickstart      a real model learns sums by GRPO, is resumed, evaluated, exported, reported
#   make test            lint, types, docs, all tests that this machine can run
#
# PYTHON=…    interpreter to build .venv from
# NPROC=…     training processes (default: one a core, at most 2)
# STEPS=…     steps of the quickstart before it is resumed for 3 more (default: 24)
# PIP_ARGS=…  more arguments for pip; on Linux without a GPU, the CPU build of torch is far smaller
#             (.venv takes under 2 GB, with the test tools under 3, not 5.6):
#             PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# SGLANG=yes  `make test` runs test-sglang-cpu as well, if its environment can be built

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first interpreter that is new enough; the pinned versions are tested with 3.11 and 3.12.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
NPROC ?= $(shell [ $(CORES) -ge 2 ] && echo 2 || echo 1)
STEPS ?= 24
PIP_ARGS ?=
SGLANG ?= no

VENV := .venv
SGLANG_VENV := .venv-sglang
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq $(PIP_ARGS) -c constraints.txt
MODEL := models/SmolLM2-135M-Instruct
DATA := data/arithmetic
RUN := runs/quickstart
TORCHRUN = OMP_NUM_THREADS=$$(( $(CORES) > $(NPROC) ? $(CORES) / $(NPROC) : 1 )) \
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m lightrl
# Of about the same length, for two cores: a name and a command each.
LANES = distributed "$(BIN)/python -m pytest tests/distributed tests/engine tests/gpu" \
	$(if $(filter yes,$(SGLANG)),sglang "$(MAKE) --no-print-directory test-sglang-if-possible") \
	unit "$(BIN)/python -m pytest tests/unit"

# Waiting OpenMP threads sleep instead of spinning: up to three times faster where processes share cores.
export OMP_WAIT_POLICY := passive
export TOKENIZERS_PARALLELISM := false

.PHONY: help install install-dev fetch quickstart test test-sglang-cpu test-sglang-if-possible lint docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# --- set-up: a stamp a stage, so that a second call takes no time --------------------------------------------------

install: $(VENV)/.stamp-quickstart  ## .venv with what the quickstart needs

install-dev: $(VENV)/.stamp-dev  ## .venv with test and lint tools as well

$(VENV)/.stamp-venv:
	@[ -n "$(PYTHON)" ] || { echo "no Python 3.11 or newer found: install one or pass PYTHON=/path/to/python"; exit 1; }
	@echo "creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.stamp-quickstart: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "installing into $(VENV) (torch is the large part; minutes without a word the first time)"
	@$(PIP) -e '.[quickstart]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-quickstart
	@echo "installing test tools into $(VENV)"
	@$(PIP) -e '.[quickstart,dev]'
	@$(PIP) reasoning-gym 2>/dev/null \
		|| echo "reasoning-gym needs a C compiler to install: the check of our sums against it will be skipped"
	@touch $@

fetch: install  ## the quickstart's model (92 MB download, 540 MB on disk) and data
	@$(BIN)/lightrl fetch smollm2-135m
	@$(BIN)/lightrl fetch arithmetic

# --- the quickstart --------------------------------------------------------------------------------------------------

quickstart: fetch  ## train, resume, evaluate, export, load and report: 3 to 7 minutes on 2 cores after the set-up
	@echo "== fresh run: removing $(RUN) (and nothing else)"
	@rm -rf $(RUN)
	@echo "== train: $(STEPS) steps of GRPO on $(NPROC) process(es)"
	@$(TORCHRUN) train configs/quickstart.toml --run.steps $(STEPS)
	@echo "== resume: 3 more steps from the last checkpoint"
	@$(TORCHRUN) train configs/quickstart.toml --run.steps $$(( $(STEPS) + 3 ))
	@echo "== evaluate on the 40 held-out sums"
	@$(TORCHRUN) eval configs/quickstart.toml
	@echo "== export as a Hugging Face folder, load it with plain transformers"
	@$(BIN)/lightrl export $(RUN)/export --run $(RUN)
	@$(BIN)/python examples/load_export.py $(RUN)/export
	@$(BIN)/lightrl report $(RUN)
	@echo "== done: open $(RUN)/report.html"

# --- checks ----------------------------------------------------------------------------------------------------------

test: install-dev fetch lint  ## everything CI runs; skipped tests are listed with their reason
	@$(BIN)/python -m lightrl.config.docs --check
ifneq ($(SGLANG),yes)
	@echo "NOT RUN: tests on the real SGLang: make test-sglang-cpu (an environment of 3 GB), or make test SGLANG=yes"
endif
	@tests/side_by_side.sh $(LANES)

test-sglang-if-possible:
	@if $(MAKE) --no-print-directory $(SGLANG_VENV)/.stamp; then $(MAKE) --no-print-directory test-sglang-cpu; \
		else echo "SKIPPED tests on the real SGLang: $(SGLANG_VENV) could not be built, for the reason above"; fi

# SGLang asks for other versions of what .venv holds, so it has an environment of its own.
test-sglang-cpu: $(SGLANG_VENV)/.stamp  ## tests on the real SGLang, on the CPU; builds .venv-sglang (3 GB, Linux)
	@PYTHONPATH=tests/sglang_cpu/stubs $(SGLANG_VENV)/bin/python -m pytest tests/engine/test_sglang_cpu.py tests/engine/test_sglang_loaders.py

$(SGLANG_VENV)/.stamp: constraints-sglang.txt tests/sglang_cpu/install.sh
	@[ "$$(uname -s)" = Linux ] || { echo "SGLang runs on Linux only"; exit 1; }
	@[ -n "$(PYTHON)" ] || { echo "no Python 3.11 or newer found: install one or pass PYTHON=/path/to/python"; exit 1; }
	@echo "installing SGLang's CPU engine into $(SGLANG_VENV)"
	@tests/sglang_cpu/install.sh $(SGLANG_VENV) $(PYTHON) $(PIP_ARGS)
	@touch $@

lint: install-dev  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: install-dev  ## write docs/configuration.md from the config schema
	@$(BIN)/python -m lightrl.config.docs --write

clean:  ## remove .venv, .venv-sglang and caches; models/, data/ and runs/ stay
	rm -rf $(VENV) $(SGLANG_VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
