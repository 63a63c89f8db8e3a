# Thin: every target is one command that can be typed by hand. `make demo` and `make test` set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# More than the two cores of a small machine: many tests wait for processes that they started.
WORKERS ?= 3
TIMES ?= 12
BUSY ?= 0
# A file stays in one process: its tests share clusters, models and imports that take seconds.
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile
READY := $(VENV)/.ready
DEMO_OUT ?= runs/demo
# An interpreter with the packages of requirements-gpu.txt: no environment of turnwise is needed.
GPU_PYTHON ?= python3
TURNWISE_TEST_DEVICE ?= cuda
DOCS_VENV ?= .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready

# Tests start hundreds of processes, and pytest rewrites every assertion. Where an environment turns bytecode files off,
# each process compiles all sources again, and the collection of the tests takes about twice as long.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-real demo-train quick test test-slow test-failed simulate repeat promises ends test-long coverage test-all engines test-vllm test-sglang test-verl test-engines engine-table test-gpu bench-gpu lint bench docs site viewer viewer-packages gateway-clients client-table mcp-servers environments test-environments clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

$(READY): constraints.txt requirements-dev.txt core/pyproject.toml $(wildcard libs/*/pyproject.toml plugins/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -r requirements-dev.txt
	touch $@

demo: $(READY)  ## multi-turn tool episodes with the tiny model, no download
	$(BIN)/turnwise rollout examples/calculator.yaml --out $(DEMO_OUT) --overwrite

demo-real: $(READY)  ## real tasks with a real model of 135 M weights; the first run downloads 93 MB and converts for minutes
	$(BIN)/python examples/fetch_smollm2.py
	$(BIN)/turnwise rollout examples/real_single_turn.yaml --out runs/real --overwrite

demo-train: $(READY)  ## GRPO with the tiny model on two CPU cores: curve and table in runs/train
	$(BIN)/turnwise train examples/train_calculator.yaml --out runs/train --overwrite

test: $(READY)  ## the quick tests, in a few minutes
	$(PYTEST) -m "not gpu and not slow"

# The core and small packages, without tests that wait, or that import Ray or the vocabularies of large models.
QUICK = core/tests libs/chat_templates libs/engine_support libs/rollout_buffer libs/strict_json libs/task_files \
	plugins/calculator_demo plugins/group_rewards plugins/reported_reward plugins/routers plugins/simulated_users \
	plugins/single_turn plugins/tool_agent --ignore core/tests/runtime/ray --ignore-glob "core/tests/runtime/test_partial*.py" \
	--ignore core/tests/runtime/test_wait_reports.py --ignore libs/chat_templates/tests/test_quirks.py \
	--ignore libs/chat_templates/tests/test_real_templates.py
quick: $(READY)  ## tests that start no process, in a minute of one core; before a commit
	$(BIN)/python -m pytest -q --quick --hypothesis-profile quick -m "not gpu and not slow and not process" $(QUICK)

# A part of the slow tests, such as 1/7; a test is always in the same one.
PART ?= 1/1
test-slow: $(READY)  ## the slow tests, and every property with more examples; PART=1/7 runs a seventh of them
	$(PYTEST) -m "not gpu and (slow or (hypothesis and not sized))" --hypothesis-profile thorough --part $(PART)

test-failed: $(READY)  ## the tests that failed in the last run, one after another
	$(BIN)/python -m pytest -m "not gpu" --last-failed --last-failed-no-failures none --hypothesis-profile thorough

repeat: $(READY)  ## the quick tests in random orders, TIMES times beside BUSY processes; PATHS="plugins/gateway" runs some
	$(BIN)/python tests/repeat.py $(TIMES) --workers $(WORKERS) --busy $(BUSY) $(PATHS)

promises: $(READY)  ## the tests of the gateway's promises, and which promises they show; runs kills on Ray for minutes
	$(BIN)/python plugins/gateway/tests/promises.py

# Cells to run, as a regular expression of their names; a later call runs those that have no outcome in runs/ends.jsonl.
ENDS ?=
ends: $(READY)  ## every end of a run: signals, full disks, lost parts of Ray, in an hour or two; ENDS="train ray" runs some
	$(BIN)/python tests/end_table.py --only "$(ENDS)" --page docs/reference/ends.md

test-long: $(READY)  ## every property with 1,000 examples, whatever its own number is; for a night
	$(PYTEST) -m "not gpu and hypothesis" --hypothesis-profile long

coverage: $(READY)  ## branch coverage of the core by its quick tests and those on Ray, with the processes that they start
	$(PYTEST) core/tests tests/test_ray_*.py tests/test_observed_runs.py -m "not gpu and (ray or not slow)" --cov --cov-report=term:skip-covered

# Seeds of each scenario but rollouts, which take less time and have six times as many: 20,000 runs in all.
SEEDS ?= 2000
SCENARIOS ?= replicas agent:tool_agent plugins/task_pool/tests/simulated_sessions.py:Sessions plugins/grpo_trainer/tests/simulated_training.py:Trainings
SIMULATE = $(BIN)/turnwise check --processes 2 --seeds
simulate: $(READY)  ## runs in random orders of events, 10 x SEEDS in all; a failing seed says how to repeat it
	$(SIMULATE) $$((6 * $(SEEDS))) --simulate rollouts
	$(SIMULATE) $(SEEDS) --simulate $(SCENARIOS)

test-all: test test-slow  ## every test that needs no GPU

engines:  ## the virtual environments of vLLM, SGLang and verl; a line for each that this machine cannot have
	.ci/engine make vllm
	.ci/engine make sglang
	.ci/engine make verl

test-vllm test-sglang test-verl:
	.ci/engine test $(@:test-%=%)

test-engines: test-vllm test-sglang test-verl  ## tests that need an engine; -j2 runs two at a time

engine-table: $(READY)  ## conformance checks and speed of every engine in one table
	rm -f runs/engine-*.json
	mkdir -p runs
	.ci/engine table vllm runs/engine-vllm.json
	.ci/engine table sglang runs/engine-sglang.json
	$(BIN)/python benchmarks/engine_table.py --engine fake --json runs/engine-fake.json
	$(BIN)/python benchmarks/engine_table.py --engine transformers --json runs/engine-transformers.json
	$(BIN)/python benchmarks/engine_table.py --show runs/engine-*.json

test-gpu bench-gpu: export TURNWISE_TEST_DEVICE := $(TURNWISE_TEST_DEVICE)

test-gpu:  ## tests on a GPU, in under 10 minutes; TURNWISE_TEST_DEVICE=cpu runs them on a CPU as far as they go
	timeout 600 $(GPU_PYTHON) tests/gpu/from_source.py -m pytest tests/gpu --confcutdir tests/gpu -p no:cacheprovider -m gpu -W default

bench-gpu:  ## speed and memory of engine, attention, weight updates and sleep on a GPU; figures in runs/gpu
	timeout 600 $(GPU_PYTHON) tests/gpu/from_source.py benchmarks/gpu.py

lint: $(READY)  ## ruff, mypy strict and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## the cost of a turn in one process and on Ray, relative to a plain asyncio loop, and whether the claims hold
	$(BIN)/python benchmarks/turn_cost.py
	$(BIN)/python benchmarks/record_cost.py
	$(BIN)/python benchmarks/ray_cost.py --latency

docs: $(READY)  ## rewrite the generated reference pages
	$(BIN)/python docs/generate.py

$(DOCS_READY): constraints.txt requirements-docs.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-docs.txt
	touch $@

site: $(DOCS_READY)  ## the documentation as a site in site/; warnings and broken links are errors
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

viewer-packages:  ## the packages that build the page of `turnwise view`, and axe, which tests it; needs npm
	npm --prefix plugins/viewer/web ci --silent --no-audit --no-fund

viewer: viewer-packages  ## build the page of `turnwise view` from plugins/viewer/web
	npm --prefix plugins/viewer/web run build

mcp-servers:  ## the MCP servers that a slow test of the MCP tools runs; needs npm for one of them
	$(PYTHON) -m venv .venv-mcp-servers
	.venv-mcp-servers/bin/python -m pip install --quiet --disable-pip-version-check mcp-server-time==2026.10.19 mcp-server-git==2026.10.19
	npm install --silent --ignore-scripts --no-audit --no-fund --prefix .venv-mcp-servers @modelcontextprotocol/server-filesystem@2026.8.31

environments: $(READY)  ## the environments of verifiers, OpenEnv and TextArena that slow tests play, in two virtual environments
	.ci/environments make

test-environments: environments  ## the tests of these environments, and a training step in verifiers and in OpenEnv
	.ci/environments test

gateway-clients: $(READY)  ## the clients that slow tests of the gateway run, or some: CLIENTS="mcp pi"; some need npm
	$(BIN)/python plugins/gateway/tests/clients/install.py $(CLIENTS)

client-table: $(READY)  ## run the installed clients of the gateway, and write docs/reference/clients.md
	$(BIN)/python plugins/gateway/tests/clients/table.py

clean:  ## remove the virtual environments, the site and the output of runs
	rm -rf $(VENV) $(DOCS_VENV) site runs
