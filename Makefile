# make quickstart   trains a small MoE model on this machine
# make test         what to run before every commit: checks, a short training run, the fast tests
# All set-up is done by `setup`, into .venv, once. Another Python: make PYTHON=python3.12 ...

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_INTEGRATIONS := $(VENV)/.ready-integrations
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# With a GPU, pip chooses the releases; without, CI's pinned ones.
CONSTRAINTS := $(if $(HAS_GPU),,--constraint constraints-cpu.txt)
# One more than the cores of a small machine: many tests wait for processes, or for a time to pass.
WORKERS ?= 3
NEWEST := $(VENV)/newest
# What `make test-newest` installs, in any pip syntax. CI names the newest release that is supported.
RELEASES ?= transformers peft trl accelerate
# These do not use transformers, or only to have a model, as other tests do that run.
WITHOUT_TRANSFORMERS := models/test_linear_cross_entropy.py integrations/test_lightning.py integrations/test_torchtitan.py
ENGINES := $(VENV)/engines
ENGINE_PACKAGES := 'ray[default,train]' skypilot
# The definition of TrainJob that Kubeflow Trainer publishes; `make test-engines` downloads it.
TRAINJOB_CRD ?= build/trainjobs.yaml
SMOKE := runs/smoke
# Python compiles what is imported, which is a small part of what is installed: for pip to compile all takes as long as the rest.
# What is imported is kept, though, whatever the environment says: else each of the many processes of the tests compiles torch and
# transformers from their sources, which takes ten seconds.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := install --quiet --disable-pip-version-check --no-compile
INSTALL := $(BIN)/python -m pip $(PIP_INSTALL) $(CONSTRAINTS) --editable
# worksteal: the files differ in length by a factor of a hundred, and a worker that is done takes tests from the other.
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: help setup setup-integrations check lint types format docs smoke test test-integrations test-newest test-all test-engines test-gpu quickstart clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo 'make check        formatter, linter and type checker (make format mends the first two)'
	@echo 'make docs         the documentation as a site, in build/site'
	@echo 'make test-integrations  the tests with PEFT, TRL, Accelerate, Lightning and W&B (installs them)'
	@echo 'make test-newest  the tests that depend on transformers, with the newest releases of it, PEFT, TRL and Accelerate'
	@echo 'make test-all     every test that needs no GPU, the slow ones included'
	@echo 'make test-engines job files on real engines: Slurm if it is installed, Ray, SkyPilot (installs both), TrainJob'
	@echo 'make test-gpu     the tests that need a GPU, one at a time'

setup: $(READY)

$(READY): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Forebay needs Python 3.11 or newer; $(PYTHON) is older. Say: make PYTHON=python3.12 ..."; exit 2; }
	@echo "Installing into $(VENV) (once; a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) '.[dev,docs]'
	@touch $(READY)

setup-integrations: $(READY_INTEGRATIONS)

$(READY_INTEGRATIONS): $(READY)
	@echo "Installing PEFT, TRL, Accelerate, Lightning and W&B into $(VENV) (once)"
	@$(INSTALL) '.[dev,docs,lightning,trl,wandb]'
	@touch $(READY_INTEGRATIONS)

check: lint types

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

quickstart: setup
	$(BIN)/forebay train quickstart

# Material's banner about MkDocs 2 is off; --strict fails on any warning.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

smoke: setup
	@rm -rf $(SMOKE)
	$(BIN)/forebay train quickstart --set train.steps=6 --set schedule.warmup=2 --set train.eval_every=0 --set checkpoint.every=3 --set log.folder=$(SMOKE)

# mypy alone takes as long as the others together.
test: setup
	$(MAKE) --jobs 2 --output-sync --no-print-directory lint types docs smoke
	$(PYTEST) -m "not slow and not integration and not gpu and not multi"
	$(if $(HAS_GPU),$(MAKE) test-gpu)

test-integrations: setup-integrations
	$(PYTEST) -m "integration and not slow and not gpu and not multi" \
	  $(shell grep --recursive --files-with-matches --word-regexp integration tests --include 'test_*.py')

# $(call on_top,FOLDER,PACKAGES): an environment on top of $(VENV) that has a few packages of its own; torch stays as it is.
define on_top
	@rm -rf $(1)
	@$(BIN)/python -m venv --without-pip $(1)
	@$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" > $(1)/below.pth
	@mv $(1)/below.pth $(1)/lib/python*/site-packages/
	@$(BIN)/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(1)/torch.txt
	@$(BIN)/python -m pip --python $(1)/bin/python $(PIP_INSTALL) --upgrade --constraint $(1)/torch.txt $(2)
endef

test-newest: setup-integrations
	$(call on_top,$(NEWEST),$(RELEASES))
	$(subst $(BIN),$(NEWEST)/bin,$(PYTEST)) -m "not slow and not gpu and not multi" tests/models tests/integrations \
	  tests/test_managed.py tests/train/test_hf_io.py tests/train/test_hf_weights.py tests/train/test_parallel.py \
	  $(addprefix --ignore tests/,$(WITHOUT_TRANSFORMERS))

test-all: check docs smoke setup-integrations
	$(PYTEST) -m "not gpu and not multi and not engine"

# One at a time: Ray and Slurm each start two processes.
test-engines: setup
	$(call on_top,$(ENGINES),$(ENGINE_PACKAGES))
	@test -f $(TRAINJOB_CRD) || curl --fail --silent --show-error --location --create-dirs --output $(TRAINJOB_CRD) \
	  https://raw.githubusercontent.com/kubeflow/trainer/master/manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml || true
	TRAINJOB_CRD=$(TRAINJOB_CRD) $(ENGINES)/bin/python -m pytest -m engine -rs -v tests/launch/test_engines.py

test-gpu: setup
	$(BIN)/python -m pytest -q -m "gpu or multi"

clean:
	rm -rf $(VENV) $(SMOKE) build dist
