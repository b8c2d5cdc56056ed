# `make train` and `make test` need nothing but Python 3.11+, pip and a package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONFIG ?= configs/gpt-tiny.yaml

.PHONY: help setup train test test-fast test-all test-faults test-parity test-easydel test-browser test-newest lint types bench study-pipemare gpu-environment gpu-check gpu-compile gpu-roofline gpu-offload tpu-environment tpu-compile plan-memory published figures docs lock

help:  # this list
	@grep -hoE '^[a-z%-]+:.*  # .*' $(MAKEFILE_LIST) | awk -F':.*  # ' '{ printf "make %-14s %s\n", $$1, $$2 }'

# jax for GPUs where a driver has put nvidia-smi.
OF_GPUS := $(if $(shell command -v nvidia-smi),$(shell echo ,gpu))
setup: $(INSTALLED)  # the environment, .venv

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxpipe needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test$(OF_GPUS)]'
	touch $(INSTALLED)

train: setup  # data and a run of CONFIG, by default configs/gpt-tiny.yaml
	$(BIN)/python -m train.prepare --config $(CONFIG) $(ARGS)
	$(BIN)/python train/train.py --config $(CONFIG) $(ARGS)

test: setup  # the tests of every change
	$(BIN)/python -m pytest -n 2 -m 'not slow' $(ARGS)

test-fast: setup  # those without pipelines and runs
	$(BIN)/python -m pytest -n 2 -m 'not slow and not end_to_end and not pipeline' $(ARGS)

test-all: setup  # all, with the slow ones
	$(BIN)/python -m pytest -n 2 $(ARGS)

# Kills, damage, other layouts, missing processes and bad values: a few of each are in `make test`.
test-faults: setup  # kills, damage and lost processes
	$(BIN)/python -m pytest -n 2 tests/faults tests/multiprocess/test_missing_processes.py tests/train/test_checkpoint.py $(ARGS)

# PyTorch is large, so it has an environment of its own; the pinned build needs Python 3.11.
test-parity:  # models against PyTorch
	test -x $(VENV)-parity/bin/python || $(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,parity]'
	$(VENV)-parity/bin/python -m pytest -n 2 tests/models/test_hugging_face.py \
		tests/models/test_adapters.py tests/end_to_end/test_fine_tuning.py

# EasyDeL asks for older versions of jax and flax, and runs with these.
test-easydel:  # EasyDeL's trainer with schedules
	test -x $(VENV)-easydel/bin/python || $(PYTHON) -m venv $(VENV)-easydel
	$(VENV)-easydel/bin/python -m pip install --quiet --disable-pip-version-check \
		easydel==0.3.0 torch==2.13.0 pillow tyro
	$(VENV)-easydel/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . \
		jax==0.10.2 jaxlib==0.10.2 flax==0.12.8
	$(VENV)-easydel/bin/python examples/easydel/compare.py

# Pages in a headless browser: Debian's package chromium, or what `playwright install chromium` loads.
test-browser: setup  # pages in a headless browser
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,browser]'
	$(BIN)/python -m pytest tests/browser $(ARGS)

# The newest JAX on the newest Python that is installed, in an environment of its own.
PYTHONS := python3 python3.12 python3.13 python3.14 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python3)
WHICH := import sys; print(*sys.version_info[:3], sys.executable)
test-newest: PYTHON = $(lastword $(shell for python in $(PYTHONS); do $$python -c '$(WHICH)'; done 2>/dev/null | sort -V))
test-newest:  # the tests on the newest Python and JAX
	test -x $(VENV)-newest/bin/python || $(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --editable '.[test]' jax
	$(VENV)-newest/bin/python -c 'import sys, jax; print("Python", sys.version.split()[0], "with JAX", jax.__version__)'
	$(VENV)-newest/bin/python -m pytest -n 2 -m 'not slow' $(ARGS)

lint: setup  # style and the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup  # mypy
	$(BIN)/mypy

bench: setup  # memory, FLOPs, throughput and bubbles on this machine
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.flops
	$(BIN)/python -m benchmarks.throughput --microbatches 8 --rounds 5
	$(BIN)/python -m benchmarks.throughput --microbatches 32 128 --rounds 0
	$(BIN)/python -m benchmarks.tick_overhead
	$(BIN)/python -m benchmarks.bubble --names 1f1b zb-v auto
	$(BIN)/python -m benchmarks.partition --names 1f1b zb-v
	$(BIN)/python -m benchmarks.utilization
	$(BIN)/python -m benchmarks.schedule_speed --names 1f1b interleaved zb-v hanayo breadth-first

study-pipemare: setup
	$(BIN)/python -m train.prepare --config configs/resnet-digits-pipemare.yaml
	$(BIN)/python -m train.prepare --config configs/translate-tiny-pipemare.yaml
	$(BIN)/python -m benchmarks.pipemare_study --config configs/resnet-digits-pipemare.yaml $(ARGS)
	$(BIN)/python -m benchmarks.pipemare_study --config configs/translate-tiny-pipemare.yaml $(ARGS)

# Of benchmarks/studies, such as study-hanayo and study-controllable-memory.
study-%: setup  # a study, such as study-hanayo
	$(BIN)/python -m benchmarks.studies.$(subst -,_,$*) $(ARGS)

# jax's CUDA plugin and compiler without the CUDA libraries: enough to compile for GPUs.
gpu-environment: setup
	test -x $(VENV)-gpu/bin/python || $(PYTHON) -m venv $(VENV)-gpu
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); \
	$(VENV)-gpu/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[train]' \
		"jax==$$version" "jax-cuda12-plugin==$$version" nvidia-cuda-nvcc-cu12 matplotlib

gpu-compile: gpu-environment  # programs compiled for GPUs, without one
	$(VENV)-gpu/bin/python benchmarks/gpu_compile.py $(ARGS)

gpu-offload: gpu-environment
	$(VENV)-gpu/bin/python benchmarks/gpu_offload.py

# libtpu, which compiles for TPUs that are not there.
tpu-environment: setup
	test -x $(VENV)-tpu/bin/python || $(PYTHON) -m venv $(VENV)-tpu
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); \
	$(VENV)-tpu/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[train]' "jax[tpu]==$$version"

tpu-compile: tpu-environment  # programs compiled for TPUs, without one
	$(VENV)-tpu/bin/python benchmarks/tpu_compile.py $(ARGS)

# On a machine with a GPU, in 12 minutes with installation; without one, in small.
EXTRAS := train$(OF_GPUS)
TRAINED := $(if $(OF_GPUS),--train.steps 20 --optimizer.warmup-steps 5,--train.steps 2 --train.batch-size 8 \
	--optimizer.warmup-steps 1 --model.width 128 --model.num-layers 2 --model.sequence-length 128)
gpu-check:  # what a GPU measures, in 12 minutes
	test -x $(VENV)-check/bin/python || $(PYTHON) -m venv $(VENV)-check
	$(VENV)-check/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[$(EXTRAS)]' matplotlib
	$(VENV)-check/bin/python benchmarks/gpu_check.py --minutes 7 $(ARGS)
	$(VENV)-check/bin/python -m train.prepare --config configs/gpt-1b.yaml
	$(VENV)-check/bin/python train/train.py --config configs/gpt-1b.yaml --run-dir runs/gpu-check \
		--train.eval-every 0 --sample.num-tokens 0 $(TRAINED)

# cuDNN alone, 0.6 GB, for its attention; what it depends on is not needed to compile.
gpu-roofline: gpu-environment  # modelled times of layers and steps on H100s
	$(VENV)-gpu/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'nvidia-cudnn-cu12<10'
	$(VENV)-gpu/bin/python benchmarks/gpu_roofline.py $(ARGS)

# Plans as `jaxpipe plan --measure` compiles them, against their predicted memory.
plan-memory: gpu-environment  # plans against the memory that they compile to
	$(VENV)-gpu/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'nvidia-cudnn-cu12<10'
	$(VENV)-gpu/bin/python -m benchmarks.plan_memory $(ARGS)

# Published runs of other systems beside what the planner's model predicts: docs/published.md.
published: setup  # predictions beside published runs
	$(BIN)/python -m benchmarks.published

figures: setup  # the pictures of the documentation
	$(BIN)/python -m benchmarks.compared_schedules
	$(BIN)/python -m benchmarks.example_pictures
	$(BIN)/jaxpipe show zb-v --stages 4 --microbatches 8 --format svg --out docs/images/zb-v.svg
	$(BIN)/jaxpipe show auto --stages 4 --microbatches 8 --costs 1,1.2,0.8 --format svg --out docs/images/auto.svg
	$(BIN)/jaxpipe compare zb-v 1f1b --stages 4 --microbatches 8 --stage-costs 1,1.2,0.8 --layers 16 --out docs/images/zb-v-and-1f1b.html

docs: setup  # the documentation, in site
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict

# Versions for every Python and platform, for `pip install --constraint requirements.lock`.
lock: setup  # requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python -m uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate \
		--extra test --extra docs --extra gpu --extra gpu-cuda13 --custom-compile-command 'make lock' \
		--output-file requirements.lock pyproject.toml
