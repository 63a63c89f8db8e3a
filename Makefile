# Thin: every target is one command that can be typed by hand. `make demo` and `make test` set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_OUT ?= runs/demo

.PHONY: demo test lint bench docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

$(READY): constraints.txt requirements-dev.txt core/pyproject.toml $(wildcard plugins/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt
	touch $@

demo: $(READY)  ## multi-turn tool episodes with the tiny model, no download
	$(BIN)/turnwise rollout examples/calculator.yaml --out $(DEMO_OUT) --overwrite

test: $(READY)  ## the tests, all but those marked gpu
	$(BIN)/python -m pytest -m "not gpu"

lint: $(READY)  ## ruff, mypy strict and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## what a turn costs, next to a bare asyncio loop
	$(BIN)/python benchmarks/turn_cost.py
	$(BIN)/python benchmarks/record_cost.py

docs: $(READY)  ## rewrite the generated reference pages
	$(BIN)/python docs/generate.py

clean:  ## remove the virtual environment and what runs wrote
	rm -rf $(VENV) runs
