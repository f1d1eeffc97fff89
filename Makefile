# `make run` and `make test` do all the set-up: a virtual environment in .venv and the install.
PYTHON ?= python3
BIN := .venv/bin

# Fast tests of single parts, for `make quick` and `make matrix`.
QUICK := $(addprefix tests/,algorithms data models objectives util test_config.py)
PYTHONS := python3.11 python3.12 python3.13

.PHONY: run quick test slow matrix lint bench clean

run: .venv/installed
	$(BIN)/fedssl run

quick: .venv/installed-dev lint
	$(BIN)/python -m pytest -n 2 -m "not slow" $(QUICK)

# CI runs this.
test: .venv/installed-dev lint
	$(BIN)/python -m pytest -n 2 -m "not slow"

slow: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 -m slow

# The quick tests on every Python that is installed, each in an environment of its own.
matrix:
	@for python in $(PYTHONS); do \
		command -v $$python >/dev/null || { echo "$$python: not installed, skipped"; continue; }; \
		echo "$$python:"; \
		$$python -m venv .venv/matrix/$$python \
			&& .venv/matrix/$$python/bin/pip install --quiet --disable-pip-version-check -e '.[dev]' \
			&& .venv/matrix/$$python/bin/python -m pytest -n 2 -m "not slow" $(QUICK) || exit 1; \
	done

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
