# make setup   the environment, made again when pyproject.toml changes
# make demo    inspect the demo model, quantize it, compare accuracy and size; see demo-output/
# make test    everything that is tested
# make check   format, lint, types, fast tests
# make format  let ruff write the format
# make clean   remove caches and build outputs; the environment stays
#
# VENV (where the environment lives) and PYTHON (what makes it) may be set: make test VENV=/tmp/env

VENV ?= .venv
PYTHON ?= python3

BIN := $(VENV)/bin
STAMP := $(VENV)/.bitwright-stamp
DEMO = $$($(BIN)/python -c "import bitwright.demo as demo; print(demo.model_path())")

export PIP_QUIET := 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.SILENT:
.PHONY: setup demo test check format clean
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
	$(BIN)/python -m pytest -n auto --dist loadgroup

check: setup
	$(BIN)/ruff format --quiet --check .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/python -m pytest -n auto -m "not slow"

format: setup
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --quiet --fix --select I .

clean:
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
