# Every target sets up .venv from the pins in requirements/ first.
# PYTHON=python3.12 picks the interpreter (3.10 to 3.13). Without it: the interpreter of .venv,
# python3.11 or python3.

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?=
BIN := $(abspath $(VENV))/bin

# Tests run in parallel processes; more threads than cores would only slow them down.
TEST_ENV := OMP_NUM_THREADS=1 PATH="$(BIN):$$PATH"
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -q

# $(call pytest,FOLDER,OPTIONS): run the tests of a folder, if it exists. pytest's exit status 5 means
# that no test of the folder is selected, for example because all are marked `full`.
define pytest
if [ -d $(1) ]; then \
    echo "== $(1)"; \
    $(PYTEST) $(2) $(1) || { status=$$?; [ $$status -eq 5 ] || exit $$status; }; \
fi
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-full lint docs dist format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## make or update .venv from the pinned requirements
	@requirements/install.sh $(VENV) $(PYTHON)

demo: setup  ## all stages of a tiny Mixture-of-Experts model on this machine, in minutes
	@PATH="$(BIN):$$PATH" bash examples/tiny_cpu/run.sh

test-fast: lint  ## lint, and the unit tests without those that are marked `slow`: before a commit
	@$(call pytest,tests/unit,-n 2 -m 'not full and not slow')

test: lint  ## the tests of CI: lint, and all tests that take seconds
	@$(call pytest,tests/unit,-n 2)
	@$(call pytest,tests/parallel,-n 2 --dist loadfile)
	@$(call pytest,tests/cuda_rehearsal,-n 2 --dist loadfile)
	@$(call pytest,tests/gpu,-k cpu)
	@$(call pytest,tests/slurm,-n 2 --dist loadgroup)
	@$(call pytest,tests/vllm,-n 2 --dist loadgroup)
	@$(call pytest,tests/e2e,-n 2 --dist loadgroup)
	@$(call pytest,tests/docs,-n 2)

test-full: lint  ## `test`, plus the tests that take minutes and those that need a GPU
	@$(call pytest,tests/unit,-n 2 -m '')
	@$(call pytest,tests/parallel,-n 2 --dist loadfile -m '')
	@$(call pytest,tests/cuda_rehearsal,-n 2 --dist loadfile -m '')
	@$(call pytest,tests/gpu,-m '')
	@$(call pytest,tests/slurm,-n 2 --dist loadgroup -m '')
	@$(call pytest,tests/vllm,-n 2 --dist loadgroup -m '')
	@$(call pytest,tests/e2e,-n 2 --dist loadgroup -m '')
	@$(call pytest,tests/docs,-n 2 -m '')

lint: docs  ## ruff, the layers of the package, size limits, types; the links of the documentation
	@$(BIN)/ruff check --quiet --output-format concise
	@output=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$output"; exit 1; }
	@$(BIN)/python tools/lint_sizes.py
	@output=$$($(BIN)/ty check --python $(abspath $(VENV)) 2>&1) || { echo "$$output"; exit 1; }
	@echo "lint: ok"

docs: setup  ## the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "docs: site/index.html"

dist: setup  ## the source archive and the wheel, in dist/
	@$(BIN)/python tools/build_release.py dist

format: setup  ## sort imports and format
	@$(BIN)/ruff check --quiet --fix --exit-zero
	@$(BIN)/ruff format

clean:  ## remove .venv, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
