# make setup   the environment, made again when pyproject.toml changes
# make demo    inspect the demo model, quantize it, compare accuracy and size; see demo-output/
# make test    everything that is tested, with two samples per op in tests of gradients
# make test-all   the same with all samples
# make check   format, lint, types, fast tests
# make test-floors   a fast part of the tests with exactly the lowest declared versions
# make docs    the documentation as a site, in build/site
# make format  let ruff write the format
# make clean   remove caches and build outputs; the environment stays
#
# VENV (where the environment lives) and PYTHON (what makes it) may be set: make test VENV=/tmp/env
# FLOORS_VENV is where that of test-floors lives.

VENV ?= .venv
FLOORS_VENV ?= .venv-floors
PYTHON ?= python3

BIN := $(VENV)/bin
STAMP := $(VENV)/.bitwright-stamp
FLOORS_STAMP := $(FLOORS_VENV)/.bitwright-stamp
# What uses every dependency, in about a minute: no torch, no other runtime is in that environment.
FLOORS_TESTS := tests/ir tests/ops tests/rewrite tests/frontend/test_onnx_import.py \
	tests/frontend/test_onnx_read.py tests/frontend/test_parameters.py tests/export/test_saved_files.py \
	tests/quant/test_statistics.py tests/quant/test_tensor.py tests/quant/test_round_scales.py \
	tests/quant/test_without_data.py tests/quant/test_sources.py tests/e2e/test_cli.py \
	tests/e2e/test_cli_data.py tests/e2e/test_executables.py tests/e2e/test_run.py \
	tests/test_public_names.py tests/test_packaging.py
# What a change most often breaks, in about a minute.
FAST_TESTS := tests/ir tests/ops tests/rewrite tests/passes/test_rules.py $(wildcard tests/test_*.py)
DEMO = $$($(BIN)/python -c "import bitwright.demo as demo; print(demo.model_path())")

export PIP_QUIET := 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.SILENT:
.PHONY: setup demo test test-all test-floors check docs format clean
.DEFAULT_GOAL := check

setup: $(STAMP)

# torch comes first, under this exact name, so that the rest finds it and pulls no other.
$(STAMP): pyproject.toml
	echo "setting up $(VENV) (the first time takes a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install -e .[dev]
	$(BIN)/python -m compileall -q src
	touch $@

demo: setup
	$(BIN)/bitwright inspect $(DEMO)
	$(BIN)/python examples/demo.py demo-output

test: setup
	$(BIN)/python -m pytest -n auto

test-all: setup
	$(BIN)/python -m pytest -n auto --exhaustive

$(FLOORS_STAMP): pyproject.toml .ci/floors.py
	echo "setting up $(FLOORS_VENV) with the lowest declared versions"
	$(PYTHON) -m venv --clear $(FLOORS_VENV)
	$(FLOORS_VENV)/bin/pip install $$($(PYTHON) .ci/floors.py images) pytest pytest-xdist hypothesis
	$(FLOORS_VENV)/bin/pip install --no-deps -e .
	touch $@

test-floors: $(FLOORS_STAMP)
	$(FLOORS_VENV)/bin/python -m pytest -n auto --skip-missing -rs -m "not slow" $(FLOORS_TESTS)

check: setup
	$(BIN)/ruff format --quiet --check .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/python -m pytest -n auto -m "not slow" $(FAST_TESTS)

# The site has the layout of the repository, so that links between documents hold in both.
docs: setup
	$(BIN)/pip install -e .[docs]
	rm -rf build/site-source && mkdir -p build/site-source/src/bitwright/demo
	cp -r README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs build/site-source/
	cp src/bitwright/demo/README.md build/site-source/src/bitwright/demo/
	$(BIN)/python -m mkdocs build --strict --quiet
	echo "build/site/index.html"

format: setup
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --quiet --fix --select I .

clean:
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
