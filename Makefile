# Every target sets up what it needs: only Python 3.11+ and make are assumed. The second call skips the set-up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
QUICK := tests/contract tests/ops/test_all_ops.py tests/training/test_resume.py tests/cli/test_generate.py
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-quick test-all lint bench docs docs-check clean

demo: $(VENV)/.installed  ## train a small model on the text inside Python and read what it generates
	$(BIN)/multilin demo

test-quick: $(VENV)/.installed-dev  ## run some tests of all kinds, in less than a minute
	$(BIN)/python -m pytest -n 2 --dist worksteal --quick $(QUICK)

test: $(VENV)/.installed-dev  ## run the tests, without those that are marked as slow
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: $(VENV)/.installed-dev  ## run all tests
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=15

lint: $(VENV)/.installed-dev  ## format, lint and type checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## run all benchmarks but those that need hours, gigabytes, a text or a card; into runs/benchmarks
	$(BIN)/python -m benchmarks --save runs/benchmarks

docs: $(VENV)/.installed-dev  ## build the documentation site into site/
	$(BIN)/python -m mkdocs build --strict

docs-check: $(VENV)/.installed-dev  ## run the commands of the pages in small, check all links, build the site: ten minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=5 tests/docs

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "multilin needs Python 3.11 or newer")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing multilin and what it needs into $(VENV) (about a minute)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development tools into $(VENV)"
	@$(PIP) --editable .[dev]
	@touch $@

clean:
	rm -rf $(VENV) runs site
