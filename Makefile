# Every target does its own set-up and can be run again.
PYTHON ?= python3
FAMILY ?= flux-kontext
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo studio test test-all torture faults lint docs browser bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/qflux demo --family $(FAMILY)

studio: $(STAMP)
	mkdir -p runs/studio
	$(BIN)/qflux studio runs/studio --demo

# Two processes of one thread each: tests are too small for threads. With more cores: make test WORKERS=8
# The quick tests keep every promise at least once; what must be long (kills, many processes, the demo) is in test-all.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not slow"

test-all: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

# Bad inputs and kills, drawn from a seed, for so many minutes; docs/reliability.md says what they are.
MINUTES ?= 10
SEED ?= 0
torture: $(STAMP)
	PYTHONPATH=tests:tests/parity $(BIN)/python -m torture --minutes $(MINUTES) --seed $(SEED) --workers $(WORKERS)

# Bugs put into the code on purpose, and which attack finds each.
faults: $(STAMP)
	PYTHONPATH=tests:tests/parity $(BIN)/python -m torture.faults

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir $(VENV)/site

# What the tests of the report need; without it they are skipped.
browser:
	command -v chromium chromedriver >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null)

bench: $(STAMP)
	$(BIN)/python benchmarks/mixed_batch.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
