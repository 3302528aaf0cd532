# make quickstart   trains a small MoE model on this machine
# make test         everything that CI runs
# All set-up is done by `setup`, into .venv, once. Another Python: make PYTHON=python3.12 ...

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# With a GPU, pip chooses the releases; without, CI's pinned ones.
CONSTRAINTS := $(if $(HAS_GPU),,--constraint constraints-cpu.txt)
WORKERS ?= 2
SMOKE := runs/smoke

.PHONY: help setup check format smoke test test-gpu quickstart clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo 'make check        formatter, linter and type checker (make format mends the first two)'
	@echo 'make test-gpu     the tests that need a GPU, one at a time'

setup: $(READY)

$(READY): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Forebay needs Python 3.11 or newer; $(PYTHON) is older. Say: make PYTHON=python3.12 ..."; exit 2; }
	@echo "Installing into $(VENV) (once; a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[dev]'
	@touch $(READY)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

quickstart: setup
	$(BIN)/forebay train quickstart

smoke: setup
	@rm -rf $(SMOKE)
	$(BIN)/forebay train quickstart --set train.steps=6 --set schedule.warmup=2 --set train.eval_every=0 --set checkpoint.every=3 --set log.folder=$(SMOKE)

test: check smoke
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not gpu and not multi"
	$(if $(HAS_GPU),$(MAKE) test-gpu)

test-gpu: setup
	$(BIN)/python -m pytest -q -m "gpu or multi"

clean:
	rm -rf $(VENV) $(SMOKE) build dist
