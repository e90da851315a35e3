# What a developer types. Everything runs in .venv, which the first target that needs it creates.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := protos/dragoman_protos/v1

.PHONY: help setup demo test lint bench soak protos clean

help:  ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(VENV)/.installed  ## Install everything into .venv

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,server,export,load,tracing,dev]'
	touch $@

demo: $(VENV)/.demo  ## Start the server with the bundled model and print translations
	$(BIN)/python -m tests.demo

# The demo needs no PyTorch: it is what a server installs.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,server]'
	touch $@

test: setup lint  ## Lint, type-check and run the whole test suite
	$(BIN)/python -m pytest

lint: setup  ## ruff, mypy strict, import-linter, stubs up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.check_stubs

bench: setup  ## Measure against CTranslate2, transformers and optimum; writes tests/benchmarks/results.json
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu,server,export,load,tracing,dev,bench]'
	$(BIN)/python -m tests.benchmarks

soak: setup  ## Chaos over 20,000 requests, then a million mixed ones; memory must not grow (hours)
	$(BIN)/python -m tests.chaos --requests 20000
	$(BIN)/python -m tests.benchmarks.soak

protos: setup  ## Regenerate the committed stubs from the .proto files
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTOS)/*.proto

clean:  ## Remove what the targets above created
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
