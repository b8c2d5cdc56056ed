# `make train` and `make test` need nothing but Python 3.11+, pip and a package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DATA := data/stdlib
CONFIG ?= configs/gpt-tiny.yaml

.PHONY: setup train test test-fast test-all lint types bench figures docs

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxpipe needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $(INSTALLED)

train: setup
	$(BIN)/python -m train.prepare --out $(DATA)
	$(BIN)/python train/train.py --config $(CONFIG) $(ARGS)

test: setup
	$(BIN)/python -m pytest -n 2 -m 'not slow'

test-fast: setup
	$(BIN)/python -m pytest -n 2 -m 'not slow and not end_to_end and not pipeline'

test-all: setup
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.throughput --microbatches 8 --rounds 5
	$(BIN)/python -m benchmarks.throughput --microbatches 32 128 --rounds 0
	$(BIN)/python -m benchmarks.tick_overhead
	$(BIN)/python -m benchmarks.bubble --names 1f1b zb-v auto
	$(BIN)/python -m benchmarks.schedule_speed --names 1f1b interleaved zb-v hanayo breadth-first

figures: setup
	$(BIN)/jaxpipe compare --stages 8 --microbatches 32 --costs 1,1.2,0.8 --layers-per-chunk 4 --out docs/images/compare.svg
	$(BIN)/jaxpipe show auto --stages 4 --microbatches 8 --costs 1,1.2,0.8 --layers-per-chunk 4 --format svg --out docs/images/auto.svg

docs: setup
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict
