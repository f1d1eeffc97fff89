# `make run` and `make test` do all the set-up: a virtual environment in .venv and the install.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test lint bench clean

run: .venv/installed
	$(BIN)/fedssl run

test: .venv/installed-dev lint
	$(BIN)/python -m pytest -n 2

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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
	rm -rf .venv build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
