# make install  make .venv with all that the others need; make clean removes it, and the demo's data and run
# make demo   install, make a data set, train on a local Ray cluster, sample, report
# make test   install, run the tests
# make faults the tests that kill workers, nodes and helpers one after the other
# make long   the tests of whole runs that take minutes each, and further cases of what the others show by one
# make kernels compile every shipped kernel for sm_90 and sm_100
# make lowest  tests with the oldest versions that pyproject.toml takes, in .cache/lowest (fetches gigabytes)
# make resolve have pip resolve constraints.txt from the package index alone (fetches gigabytes)
# make lint   ruff and mypy
# make bench  eight of the benchmarks whose figures stand in docs/results.md; heddle bench --help has all
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DATA := datasets/demo
HELD_OUT := datasets/demo-held-out
RUN := runs/demo
CODE := app actors data ops tests
# Test processes: a third of their time they wait for Ray, so three keep two cores busy.
JOBS ?= 3
LOWEST := .cache/lowest

export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0
export TOKENIZERS_PARALLELISM := false
# Empty is as unset. Container images often set it; then every process compiles what it imports: 15 s instead of 5.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test faults long kernels lowest resolve lint bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt actors/plan/strategies/search/annealer.c
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "Heddle needs Python 3.11, 3.12 or 3.13; $$($(PYTHON) -V 2>&1) is not: make PYTHON=python3.13"; exit 2; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	# Python compiles what is imported: with all 23,000 files this took 176 s on 2 cores, without 100.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

$(DATA)/shards: | $(STAMP)
	$(BIN)/heddle data synth $(DATA)

$(HELD_OUT)/shards: | $(STAMP)
	$(BIN)/heddle data synth $(HELD_OUT) --clips 18 --images 6 --shards 1 --seed 1 --no-koala

demo: $(STAMP) | $(DATA)/shards $(HELD_OUT)/shards
	$(BIN)/heddle train --config configs/runs/demo.yaml --overwrite \
	  --set "validation.sources=[{path: $(HELD_OUT)/shards}]" --set validation.every=100
	$(BIN)/heddle sample --checkpoint $(RUN)
	$(BIN)/heddle report $(RUN)
	@echo
	@echo "report    $(RUN)/report.html"
	@echo "timeline  $(RUN)/timeline.json (open it at ui.perfetto.dev)"
	@echo "clips     $(RUN)/samples/"

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

faults: $(STAMP)
	$(BIN)/python -m pytest -q -m faults

long: $(STAMP)
	$(BIN)/python -m pytest -q -m long

kernels: $(STAMP)
	$(BIN)/python -m pytest -q -m kernels

lowest: $(STAMP)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip compile --quiet --python $(BIN)/python --resolution lowest-direct --extra xgboost --extra wandb \
	  --extra mlflow --output-file $(LOWEST)/versions.txt pyproject.toml
	$(BIN)/uv pip install --quiet --python $(LOWEST) --requirement $(LOWEST)/versions.txt pytest pytest-timeout hypothesis peft
	$(LOWEST)/bin/python -m pytest -q tests/ops tests/families tests/data tests/app/test_sample.py tests/app/test_export.py
	$(LOWEST)/bin/python -m app.bench.gpu --rehearse --minutes 30

resolve: $(STAMP)
	$(BIN)/python -m pytest -q -m install

lint: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

bench: $(STAMP)
	for name in planner ops data runtime ulysses optimizer elastic learn; do echo "== $$name"; $(BIN)/heddle bench $$name || exit 1; done

clean:
	rm -rf $(VENV) $(RUN) $(DATA) $(HELD_OUT) .pytest_cache .mypy_cache .ruff_cache
