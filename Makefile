PYTHON ?= python3
BIN := .venv/bin
CORE := .venv/.installed-core
DEV := .venv/.installed-dev

.PHONY: compare test lint types bench wheel-check clean
.NOTPARALLEL:

compare: $(CORE)  ## The leaderboard on the shipped recording.
	$(BIN)/speckv compare

# One thread for each of the processes: two of them with several threads each get in each other's way.
test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(DEV)
	$(BIN)/mypy

bench: $(DEV)
	$(BIN)/pytest benchmarks

# The wheel, built from the sdist, must work without extras and outside the checkout.
wheel-check: $(DEV)
	set -eu; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(BIN)/python -m build --outdir "$$tmp"; \
	$(BIN)/python -m venv "$$tmp/venv"; \
	"$$tmp/venv/bin/pip" install -c constraints.txt "$$tmp"/*.whl; \
	cd "$$tmp"; \
	venv/bin/python -c 'from importlib.util import find_spec as find; assert not find("torch"), "torch is installed"'; \
	venv/bin/speckv --help; \
	venv/bin/speckv compare; \
	venv/bin/speckv check

clean:
	rm -rf build dist .benchmarks .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name .venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -c constraints.txt -e .
	touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -c constraints.txt -e '.[live,dev]'
	touch $(CORE) $@
