# make demo | check | test | test-all | docs | lint | bench | convex: each target sets up .venv itself. You only need Python 3.10+ and make.
PYTHON ?= python3
BIN := .venv/bin
# in the tests and the demo, several processes share the cores
export OMP_NUM_THREADS ?= 1
# processes of pytest, side by side; many tests start four more
WORKERS ?= 2
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo check quick test test-all docs bench convex lint format clean

demo: .venv/demo-ready
	$(BIN)/rumor demo

# one suite, three selections: the tests of one process (beside lint); all but the long ones; all
check:
	$(MAKE) --jobs 2 --no-print-directory lint quick

quick: .venv/ready
	$(PYTEST) -m "not processes and not long"

test: .venv/ready
	$(PYTEST) -m "not long"

test-all: .venv/ready
	$(PYTEST)

# --strict turns warnings into errors; the variable hides a notice about MkDocs 2 that is not about our pages
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

# The demo needs little beside torch. Tests, docs and lint bring Ray, Lightning, transformers and their own tools.
# torch goes first: once the pinned build is there, nothing else pulls in another one. Only the modules that the demo imports are
# compiled (by importing them), which saves a fifth of the disk and half of the time.
.venv/demo-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --no-compile torch numpy
	$(PIP) --no-compile --editable '.[demo]'
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import matplotlib.pyplot, rumor.cli, rumor.demo.training, sklearn.datasets, torch._dynamo'
	touch $@

.venv/ready: .venv/demo-ready
	$(PIP) --editable '.[dev]'
	$(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null || true  # some files are not meant to be compiled
	touch $@
