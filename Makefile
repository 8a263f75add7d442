PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet
# Puts this folder on the path of .venv. Setuptools' default would hide `ssd` from a script beside the clone, and its
# types from mypy and editors.
EDITABLE := $(PIP) --config-settings editable_mode=compat -e
STAMP := .venv/.stamp
CLIENTS := .venv/.conformance
AGENTS := $(patsubst %,.venv-%/.stamp,agents aider crewai)
ROUTERS := .venv-routers/.stamp
NODE := $(patsubst %,tests/conformance/%/node_modules/.stamp,node promptfoo)
PYTEST := $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help venv pull demo test test-all conformance gpu gpu-rehearsal lint clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(STAMP) ## create .venv with ssd and its development tools

# Without CUDA a CPU build of torch is preferred where pip finds one: it is a tenth of the size. Such a build asks for no
# Triton (200 MB), whose interpreter the tests of the kernels need; with CUDA, torch names its own version.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	command -v nvidia-smi >/dev/null || $(PIP) torch==2.13.0 || echo "torch 2.13.0 not found, taking another version"
	command -v nvidia-smi >/dev/null || $(PIP) --no-deps triton==3.7.1 || echo "triton 3.7.1 not found, taking another version"
	$(EDITABLE) ".[dev]"
	$(BIN)/ssd pull
	touch $@

pull: venv ## compile the kernels and fetch the built-in model pair (93 MB), once
	$(BIN)/ssd pull smollm2

demo: venv ## a story, an edit and an emulated 70B pair, each beside plain decoding
	$(BIN)/ssd demo

test: venv pull ## run the tests but the long ones, in three processes
	$(PYTEST) -m "not thorough"

test-all: venv pull ## run all tests but those of clients and GPUs, in three processes
	$(PYTEST)

conformance: venv pull $(CLIENTS) $(AGENTS) $(ROUTERS) $(NODE) ## real clients of other projects against `ssd launch`
	$(BIN)/pytest -q tests/conformance

$(CLIENTS): $(STAMP)
	$(EDITABLE) ".[conformance]"
	touch $@

$(AGENTS): .venv-%/.stamp: tests/conformance/agents/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --no-deps -r $<
	touch $@

$(ROUTERS): tests/conformance/routers.txt
	$(PYTHON) -m venv .venv-routers
	.venv-routers/bin/python -m pip install --quiet -r $<
	touch $@

# What is optional, as promptfoo's clients of clouds and its browser, is ten times as large as the rest.
$(NODE): %/node_modules/.stamp: %/package.json
	if command -v npm >/dev/null; then \
	npm install --silent --no-package-lock --omit=optional --ignore-scripts --prefix $(<D) && touch $@; \
	else echo "no npm: Node's clients are skipped"; fi

gpu: venv ## the tests that need a CUDA device
	$(BIN)/pytest -q tests/gpu $(wildcard tests/plugins/*/gpu)

gpu-rehearsal: venv ## the calls of the GPU report on a stand-in for CUDA, and what to carry to a device
	$(BIN)/python -m tools.gpu_rehearsal $(REHEARSAL)

lint: venv ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy ssd

clean: ## remove .venv, builds and caches
	rm -rf .venv .venv-* tests/conformance/*/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find ssd tests tools examples -name __pycache__ -prune -exec rm -rf {} +
