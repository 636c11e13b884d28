# Every target sets up what it needs: a virtual environment in .venv with the tested versions.
# Needs only make and Python 3.11 or newer; name another interpreter with `make test PYTHON=python3.13`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format site pictures bench build clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gradvitals needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(READY)  ## make .venv with the tested versions

demo: $(READY)  ## plant a bug in a small training run, find it and fix it, in under a minute
	$(BIN)/gradvitals demo

# Each worker starts with half of the tests in order and then takes from the other half: most modules run on one worker,
# which imports and sets up what they need once. Two workers keep two cores busy, because many tests start processes of
# their own. Bytecode is written in any case, so that these processes share it.
test: $(READY)  ## run all tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY)  ## check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

site: $(READY)  ## build the documentation, with a page per rule, into docs/_build; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

pictures: $(READY)  ## draw the pictures of the documentation and its gallery anew; needs Chromium
	$(BIN)/python -m docs.pictures.draw

bench: $(READY)  ## measure what monitoring costs on this machine
	$(BIN)/gradvitals bench overhead
	$(BIN)/python -m benchmarks.store

build: $(READY)  ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove caches and builds, keep .venv and runs/
	rm -rf dist docs/_build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks experiments -name __pycache__ -type d -prune -exec rm -rf {} +
