# `make run` and `make test` do all the set-up: a virtual environment in .venv and the install.
PYTHON ?= python3
BIN := .venv/bin

# Tests of single parts and of results that must not change.
QUICK := -n 2 -m "not slow" \
	$(addprefix tests/,algorithms config data federation golden models objectives util)
# Oldest and newest supported versions, for `make matrix`.
PYTHONS := python3.11 python3.13
TORCHES := torch==2.8.0 torch

.PHONY: run quick test slow matrix lint bench clean

run: .venv/installed
	$(BIN)/fedssl run

quick: .venv/installed-dev lint
	$(BIN)/python -m pytest $(QUICK)

# CI runs this.
test: .venv/installed-dev lint
	$(BIN)/python -m pytest -n 2 -m "not slow"

slow: .venv/installed-dev matrix
	$(BIN)/python -m pytest -n 2 -m slow

# The quick tests with every supported version that can be installed here.
matrix:
	@for python in $(PYTHONS); do for torch in $(TORCHES); do \
		environment=.venv/matrix/$$python-$$torch; \
		echo "$$python, $$torch"; \
		$$python -m venv $$environment && $$environment/bin/pip install --quiet \
			--disable-pip-version-check -e '.[dev]' "$$torch" \
			|| { echo "cannot be installed, skipped"; continue; }; \
		$$environment/bin/python -m pytest $(QUICK) || exit 1; \
	done; done

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: .venv/installed-dev
	$(BIN)/python benchmarks/cohort.py
	$(BIN)/python benchmarks/silo.py --samples 512
	$(BIN)/python benchmarks/engines.py

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("fedssl needs Python 3.11 or later; set PYTHON=python3.12, for example" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ .venv/installed

clean:
	rm -rf .venv build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
