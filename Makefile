# The two commands: `make run` and `make test`. Both make .venv first.
PYTHON ?= python3
PORT ?= 8501
# FAST=1: without the tests that start processes, or need a browser or PostgreSQL.
FAST ?=
# Test processes, on two cores. The whole took 549 s with three, 508 with four and 507 with five, and takes 464 to 487 with
# four since; FAST=1 118 s with two, 95 with three, 87 to 90 with four and 94 with five: each waits now and then, for the
# disk, and in tests of those who wait.
JOBS ?= 4
BIN := .venv/bin
export PYTHON
# Each test process would compile all tests, and what they import, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test lint chaos bench gpu clean setup setup-tests

run: setup  ## the console and a real training job on this machine
	@exec $(BIN)/python -m app demo --port $(PORT)

test: setup-tests  ## all tests but the long ones; FAST=1: those without processes
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(if $(FAST),--fast) -m "not chaos" tests --ignore tests/chaos

lint: setup-tests  ## style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@mkdir -p .mypy_cache/source/openrecycle
	@ln -sfn $(CURDIR)/.src/openrecycle/*.py $(CURDIR)/agent $(CURDIR)/app $(CURDIR)/db $(CURDIR)/planner .mypy_cache/source/openrecycle
	@$(BIN)/mypy

chaos: setup-tests  ## hundreds of kills, every bit compared (more than an hour)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "chaos or hypothesis" --hypothesis-profile at-length tests

bench: setup-tests  ## every benchmark, with the machine's load beside each figure
	@for file in tests/benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python -m tests.benchmarks.$$(basename $$file .py) || exit 1; done

gpu:  ## the product on this machine's GPU, in up to 20 minutes; with the Python and torch that are here
	@$(PYTHON) -m tests.gpu

setup:
	@sh .ci/setup requirements.txt

setup-tests:
	@sh .ci/setup tests/requirements.txt

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
