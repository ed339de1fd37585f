# make test | demo | docs | bench | convex | lint: each sets up .venv by itself; all they need is Python 3.10+ and make.
PYTHON ?= python3
BIN := .venv/bin
# several processes share the cores in tests and demo
export OMP_NUM_THREADS ?= 1

.PHONY: test demo docs bench convex lint format clean

test: .venv/ready
	$(BIN)/python -m pytest

demo: .venv/ready
	$(BIN)/rumor demo

# warnings are errors; the variable hushes an advertisement that is none
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site
	@echo "the site is in site/: open site/index.html"

bench: .venv/ready
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/core.py --out benchmarks/results/core.json
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/convex.py --out benchmarks/results/convex.json

convex: .venv/ready
	$(BIN)/python experiments/logistic_regression.py --figure 1 4 5 6 7 extra --seeds 3 --out docs/convex
	$(BIN)/python experiments/logistic/page.py

lint: .venv/ready
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv

# torch goes first: with the pinned build in place, nothing else pulls another one
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
