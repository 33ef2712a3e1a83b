# make demo    train a small model from the drive; sets up .venv first
# make bench   measure the drive of FOLDER in under a minute, and draw it into drive.png
# make test    run the tests
# make check   lint, format, types, layers
# make docs    build the documentation into build/docs
# make gpu-check  measure on this machine's GPU, in four minutes
# make venv    only set up .venv, with everything that the other targets need
# make format  put the sources into the form that `make check` asks for
# make clean   remove .venv and what was built
#
# ARGS is handed on: make demo ARGS=--json, make test ARGS="-k digest -x".

VENV ?= .venv
PYTHON ?=
ARGS ?=
FOLDER ?= .
# Processes that run tests. Many tests wait for drives and for children, so two cores carry three.
JOBS ?= 3
BIN := $(VENV)/bin
# Hundreds of processes import the same modules: whatever the environment says, compile them once.
export PYTHONDONTWRITEBYTECODE :=
# What decides about the content of .venv.
RECIPE := setup.cfg pyproject.toml constraints.txt tools/setup_venv.sh

.PHONY: demo bench test check docs gpu-check format venv clean

demo: $(VENV)/.core
	$(BIN)/tensorspill demo $(ARGS)

bench: $(VENV)/.pictures
	$(BIN)/tensorspill bench --quick $(FOLDER) --png drive.png $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m tests.warming
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

docs: $(VENV)/.test
	$(BIN)/mkdocs build --strict --site-dir build/docs

gpu-check: $(VENV)/.test
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

venv: $(VENV)/.dev

# A stamp is younger than the recipe once its part of the environment is complete.
$(VENV)/.core: $(RECIPE)
	VENV=$(VENV) PYTHON=$(PYTHON) tools/setup_venv.sh
	touch $@

$(VENV)/.pictures: $(RECIPE)
	VENV=$(VENV) PYTHON=$(PYTHON) tools/setup_venv.sh pictures
	touch $@ $(VENV)/.core

$(VENV)/.test: $(RECIPE)
	VENV=$(VENV) PYTHON=$(PYTHON) tools/setup_venv.sh test
	touch $@ $(VENV)/.core $(VENV)/.pictures

$(VENV)/.dev: $(RECIPE)
	VENV=$(VENV) PYTHON=$(PYTHON) tools/setup_venv.sh test dev
	touch $@ $(VENV)/.test $(VENV)/.core $(VENV)/.pictures

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .mypy_cache .pytest_cache .ruff_cache
