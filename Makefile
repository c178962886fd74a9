# `make demo` and `make test` do all the set-up on a fresh machine; both are quick the second time.
# Another Python: make test PYTHON=python3.13 (3.11 or newer, with the venv module).

PYTHON ?= python3
VENV := .venv
# Folder of the store of `make real`; and options of tests.real.page, such as --limit 100.
REAL ?= build/real
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The tested set also for what pip builds in isolation (the second name is for pip 25.3 and newer).
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt

# Compiled modules are kept even where the environment says otherwise: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo docs gallery notebooks check test wide real lint format typecheck bench families clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       the main job on the built-in model, offline"
	@echo "make check      lint, type check and the tests of what changed: for daily work"
	@echo "make test       lint, type check and the tests"
	@echo "make wide       further tests: CI runs them after those"
	@echo "make real       every workflow on two pretrained models: docs/real-models.md, and tests marked real"
	@echo "make docs       the pages of docs/ as a site in build/site, offline"
	@echo "make gallery    every workflow at its defaults, reports linked from build/gallery/index.html"
	@echo "make notebooks  the tutorial as docs/notebooks, from its pages"
	@echo "make lint       ruff only;  make format rewrites"
	@echo "make typecheck  mypy only"
	@echo "make families   docs/families.md: every family, and how far it is from transformers"
	@echo "make bench      benchmarks against the plain forward pass and the disk"
	@echo "make clean      remove the environment, builds and caches of tools"

demo: $(VENV)/installed
	HF_HUB_OFFLINE=1 $(BIN)/mizarr demo

# A warning - a link that leads nowhere, a name that is not there - is an error.
docs: $(VENV)/installed-docs
	$(BIN)/python docs/site/drawings.py
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs build/site
	@echo "build/site/index.html"

# Some minutes the first time.
gallery: $(VENV)/installed-test
	HF_HUB_OFFLINE=1 $(BIN)/python docs/site/gallery.py build/gallery

notebooks: $(VENV)/installed-test
	$(BIN)/python -m tests.docs.notebooks

# Those tests that look at what differs from the last commit (tests/changed.py).
check: lint typecheck
	$(BIN)/pytest -n logical --dist loadfile $$($(BIN)/python tests/changed.py)

# A worker per core; tests of one file stay together, as they share what is slow to set up.
test: lint typecheck
	$(BIN)/pytest -n logical --dist loadfile -m "not slow and not wide and not network and not gpu and not real"

# What `test` leaves to CI and to `check`.
wide: $(VENV)/installed-test
	$(BIN)/pytest -n logical --dist loadfile -m "wide and not slow and not network and not gpu and not real"

# Fetches 350 MB and takes hours of processor time the first time, about a minute once all is stored.
real: $(VENV)/installed-test
	$(BIN)/python -m tests.real.page $(REAL)
	$(BIN)/pytest -m real tests/real

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(VENV)/installed-test
	$(BIN)/mypy
	MYPYPATH=tests/benchmarks:. $(BIN)/mypy --cache-dir .mypy_cache/users --follow-imports=silent tests/typing/api.py tests/benchmarks/*.py tests/specimen_training/[!t]*.py tests/specimen_training/train.py

# Status 2: what a benchmark measures is not on this machine (a GPU), as it says; the others go on.
bench: $(VENV)/installed-test
	@for file in tests/benchmarks/bench_*.py; do \
		echo "== $$file"; $(BIN)/python $$file || [ $$? -eq 2 ] || exit 1; done

families: $(VENV)/installed-test
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.measure_families

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an install is repeated when the requirements changed, not before.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --editable '.[plots]'
	mkdir -p $(VENV)/src && ln -sfn "$(CURDIR)" $(VENV)/src/mizarr
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) install --quiet --editable '.[test]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) install --quiet --editable '.[docs]'
	touch $@
