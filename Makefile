# Thin: every target is one command that can be typed by hand. `make demo` and `make test` set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_OUT ?= runs/demo

.PHONY: demo demo-train test engines test-engines lint bench docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

$(READY): constraints.txt requirements-dev.txt core/pyproject.toml $(wildcard libs/*/pyproject.toml plugins/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt
	touch $@

demo: $(READY)  ## multi-turn tool episodes with the tiny model, no download
	$(BIN)/turnwise rollout examples/calculator.yaml --out $(DEMO_OUT) --overwrite

demo-train: $(READY)  ## GRPO with the tiny model on two CPU cores: curve and table in runs/train
	$(BIN)/turnwise train examples/train_calculator.yaml --out runs/train --overwrite

test: $(READY)  ## the tests, all but those marked gpu
	$(BIN)/python -m pytest -m "not gpu"

engines:  ## the virtual environments of vLLM, SGLang and verl; says what cannot be had here, and why
	.ci/engine make vllm
	.ci/engine make sglang
	.ci/engine make verl

test-engines: $(READY)  ## the engines' suites, each in its environment, and the table of what they can and how fast
	mkdir -p runs
	$(BIN)/python -m pytest plugins/transformers_engine -q
	$(BIN)/python benchmarks/engine_table.py --engine fake --json runs/engine-fake.json
	$(BIN)/python benchmarks/engine_table.py --engine transformers --json runs/engine-transformers.json
	.ci/engine test vllm runs/engine-vllm.json
	.ci/engine test sglang runs/engine-sglang.json
	.ci/engine test verl
	$(BIN)/python benchmarks/engine_table.py --show runs/engine-*.json

lint: $(READY)  ## ruff, mypy strict and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## what a turn costs, next to a bare asyncio loop, in one process and on Ray, and what is promised of it
	$(BIN)/python benchmarks/turn_cost.py
	$(BIN)/python benchmarks/record_cost.py
	$(BIN)/python benchmarks/ray_cost.py --latency

docs: $(READY)  ## rewrite the generated reference pages
	$(BIN)/python docs/generate.py

clean:  ## remove the virtual environment and what runs wrote
	rm -rf $(VENV) runs
