# One file of commands. `make demo` and `make test` work on a fresh clone; set-up is skipped while nothing that it depends on changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
REPORT ?= report
PEERS  := $(VENV)/bench
BENCH  ?=

# Two workers of one thread each: small products gain nothing from a second thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses=2 --dist=loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format benchmark bench clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.stamp-run  ## install, then audit a small network on real digits; writes report/report.html
	$(BIN)/flatminima audit digits-mlp --out $(REPORT)

test: lint  ## install, then run every check but the tests marked slow
	$(PYTEST)

test-all: lint  ## the same with the tests marked slow, and new random examples for the properties
	$(PYTEST) -m "slow or not slow" --hypothesis-profile=default

lint: $(VENV)/.stamp-dev  ## style, types and the order of the layers, without the tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.stamp-dev  ## put the code into the one format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

benchmark: $(VENV)/.stamp-run  ## time the command and the audit of digits-mlp; count how often intervals hold the truth
	$(BIN)/python benchmarks/cli_startup.py
	$(BIN)/python benchmarks/audit_digits.py
	$(BIN)/python benchmarks/interval_coverage.py

bench: $(PEERS)/.stamp  ## compare speed and memory with other packages; BENCH="--quick" takes two minutes
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m benchmarks.curvature $(BENCH)

clean:  ## remove .venv, caches and build products; reports stay
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written only after its step succeeded, so an interrupted set-up starts again.
$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'flatminima needs Python 3.11 or newer. Name one: make PYTHON=python3.11 ...' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo 'The venv module did not work. On Debian: apt install python3-venv' >&2; exit 1; }
	@touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo 'Installing flatminima and what it needs into $(VENV). The first time takes minutes.'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo 'Installing flatminima, what it needs and the tools of its checks into $(VENV). The first time takes minutes.'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.stamp-run

# The packages to compare with live in a second environment, which sees all that is installed in the first.
$(PEERS)/.stamp: $(VENV)/.stamp-run benchmarks/constraints.txt
	$(BIN)/python -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --no-deps --requirement benchmarks/constraints.txt
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> "$$($(PEERS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/flatminima.pth"
	@touch $@
