# make quickstart            everything from nothing: environment, package, and the method at work on this machine
# make test                  lint, types and all tests
# make venv PYTHON=python3.12
#
# The environment is made for a machine without a GPU. Where PyPI's torch is a CUDA build (Linux), name PyTorch's CPU
# index: make venv TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: venv install quickstart test lint types clean

venv install: $(READY)

# One command under the versions that were tested together: pip left to itself searches old releases for minutes.
$(READY): setup.py pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints-cpu.txt -e ".[cpu,dev]"
	@if $(BIN)/python -m pip list --disable-pip-version-check 2>/dev/null | grep -i '^nvidia'; then \
		echo 'A CUDA build of torch was installed. Fix: make clean-venv venv TORCH_INDEX=https://download.pytorch.org/whl/cpu'; \
		exit 1; \
	fi
	touch $@

# For example: make quickstart ARGS="--algo ppo --seed 2"
quickstart: $(READY)
	$(BIN)/rltr quickstart $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -n 2 --dist loadfile

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.PHONY: clean-venv
clean-venv:
	rm -rf $(VENV)
