# Every target sets up .venv from the pins in requirements/ first.
# PYTHON=python3.12 picks the interpreter (3.10 to 3.13). Without it: the interpreter of .venv,
# python3.11 or python3.

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?=
BIN := $(abspath $(VENV))/bin

# Tests run in parallel processes; more threads than cores would only slow them down. They start hundreds of
# programs, which shall not compile the package each time.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= PATH="$(BIN):$$PATH"
PYTEST := $(TEST_ENV) "$(BIN)/python" -m pytest -q

# So many processes take all tests in the order of tests/conftest.py, what takes longest first. On two
# cores that is one more than cores: many tests wait half of their time, for servers, signals and jobs.
JOBS ?= 3
SHARED_OUT := -n $(JOBS) --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-full lint docs dist format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## make or update .venv from the pinned requirements
	@requirements/install.sh "$(VENV)" $(PYTHON)

demo: setup  ## all stages of a tiny Mixture-of-Experts model on this machine, in minutes
	@PATH="$(BIN):$$PATH" bash examples/tiny_cpu/run.sh

test-fast: lint  ## lint, and the unit tests without those that are marked `slow`: before a commit
	@$(PYTEST) $(SHARED_OUT) -m 'not full and not slow' tests/unit

test: lint  ## the tests of .ci/run: lint, and all tests that take seconds
	@$(PYTEST) $(SHARED_OUT) tests

test-full: lint  ## `test`, plus the tests that take minutes and those that need a GPU
	@$(PYTEST) $(SHARED_OUT) -m '' --ignore tests/gpu tests
	@$(PYTEST) -m '' tests/gpu

lint: docs  ## ruff, the layers of the package, size limits, types; the links of the documentation
	@"$(BIN)/ruff" check --quiet --output-format concise
	@output=$$("$(BIN)/lint-imports" --no-logo 2>&1) || { echo "$$output"; exit 1; }
	@"$(BIN)/python" tools/lint_sizes.py
	@output=$$("$(BIN)/ty" check --python "$(abspath $(VENV))" 2>&1) || { echo "$$output"; exit 1; }
	@echo "lint: ok"

docs: setup  ## the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --strict --quiet
	@echo "docs: site/index.html"

dist: setup  ## the source archive and the wheel, in dist/
	@"$(BIN)/python" tools/build_release.py dist

format: setup  ## sort imports and format
	@"$(BIN)/ruff" check --quiet --fix --exit-zero
	@"$(BIN)/ruff" format

clean:  ## remove .venv, caches and build outputs; runs/ stays
	@[ ! -e "$(VENV)" ] || [ -f "$(VENV)/pyvenv.cfg" ] || { echo "$(VENV) is no virtual environment" >&2; exit 1; }
	rm -rf "$(VENV)" build dist site *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
