# Everything sets up what it needs first; run any target at any time.
PYTHON ?= python3
# For `make demo`: STORE=folder or STORE=s3; MODEL=a folder or a name (default: made on the spot).
STORE ?= folder
MODEL ?=
# For `make test-matrix`: releases, such as VLLM="0.31.0 0.32.0" (default: all that we serve).
VLLM ?=
# For `make nightly`: some suites alone, such as SUITES="cases fuzz" (default: all).
SUITES ?=
# For `make fuzz`: which cases (default: others each day), and how many times as many as `make unit`
# tries.
SEED ?= $(shell date -u +%Y%m%d)
SEED := $(SEED)
CASES ?= 20

BIN := .venv/bin
# Python may keep what it compiled: without it each process compiles our modules, and pytest's each
# test, again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test static lint unit packaging engines nightly test-cases test-models test-faults test-direct test-gpu test-browser fuzz soak release test-matrix constraints docs dashboard-picture monitoring model-table clean
help:
	@echo "make demo [STORE=folder|s3] [MODEL=...]   run encode, prefill and decode engines and compare"
	@echo "make test                                 lint, unit tests, S3 tests, the wheel, real-engine tests"
	@echo "make lint | unit | packaging | engines    one part of the above"
	@echo "make nightly [SUITES=...] [VLLM=...]      all of the following, and one table: what a release needs; hours"
	@echo "make test-cases                           further cases of what the gate tries once: minutes"
	@echo "make test-models                          real engines beyond that, of more models: minutes"
	@echo "make test-faults                          real engines whose store fails: minutes"
	@echo "make test-direct                          KV handed over by NIXL, which this installs, and faults on the way: minutes"
	@echo "make test-gpu [PYTHON=...]                on a GPU, by a Python with torch; with vLLM there, engines too: minutes"
	@echo "make test-browser                         the router's dashboard in Chromium, if it is installed"
	@echo "make fuzz [SEED=...] [CASES=...]          hostile input of every kind: minutes"
	@echo "make soak [MINUTES=60]                    a fleet whose parts fail again and again: nothing lost, nothing grows"
	@echo "make release [REHEARSE=1]                 build what a release has, twice, and try it: minutes; publishes nothing"
	@echo "make test-matrix [VLLM=...]               what vLLM can break, on each release we serve: hours"
	@echo "make docs                                 write docs/config.md from the option types"
	@echo "make dashboard-picture                    draw docs/images/dashboard.png by Chromium"
	@echo "make monitoring                           write examples/monitoring from the metrics' own tables"
	@echo "make model-table                          write docs/model-table.md from vLLM's registry: a minute"
	@echo "make constraints                          write constraints.txt: the versions in .venv"
	@echo "make setup | clean                        make or remove .venv and .cache"

setup:
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "setup failed: there is no $(PYTHON) here: install Python 3.11 to 3.14," \
			"or name the one to use: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) scripts/setup.py

demo: setup
	@$(BIN)/python -m examples.one_box.demo --store "$(STORE)" $(if $(MODEL),--model "$(MODEL)")

# All parts at once: engines that start leave half of two cores idle. What runs beside the unit tests
# says all in one piece, when it has ended.
test: setup
	@$(MAKE) --no-print-directory -j 3 WORKERS=2 unit beside-static beside-engines

beside-%: setup
	@mkdir -p .cache; \
	$(MAKE) --no-print-directory $* > .cache/$*.log 2>&1; status=$$?; \
	cat .cache/$*.log; exit $$status

static: lint packaging

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run $(wildcard *.sh */*.sh */*/*.sh)

# Three at a time, each file's in one process: tests that wait leave a quarter of two cores idle. The
# longest files first (as tests/conftest.py sorts them), so that none is left to run alone.
WORKERS := 3
unit: setup
	$(BIN)/python -m pytest -q -m "not engine and not packaging and not browser and not nightly" \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The wheel with its most used extras in empty environments: a minute, and a package index. To
# collect the other tests takes longer than to run some of these: tests/conftest.py refuses such
# tests elsewhere.
PACKAGING_TESTS := tests/packaging
packaging: setup
	$(BIN)/python -m pytest -q -m "packaging and not nightly" $(PACKAGING_TESTS)

# Three at a time: engines that start leave half of two cores idle. To collect all tests takes a
# while: tests/conftest.py refuses tests of engines elsewhere.
ENGINE_TESTS := tests/engines tests/benchmarks tests/lab/test_fork_server.py
engines: setup
	TESTS_LOGS=engines $(BIN)/python -m pytest -v -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--durations=40 --durations-min=3 \
		-m "engine and not models and not nightly" $(ENGINE_TESTS)

# All that the gate has no time for; goes on after a failure, and ends with a table.
nightly: setup
	@$(BIN)/python -m scripts.nightly --seed "$(SEED)" --vllm "$(VLLM)" $(SUITES)

# Cases of which the gate tries one of each kind.
test-cases: setup
	$(BIN)/python -m pytest -q -m "nightly and not engine and not browser" \
		-n 2 --dist loadfile

test-models: setup
	$(BIN)/python -m pytest -v -m "models or (nightly and engine)"

# In a mount namespace of its own, where the system gives one: some cases fill up disks.
test-faults: setup
	@if unshare -rm true 2>/dev/null; then own="unshare -rm"; fi; \
	$$own $(BIN)/python -m pytest -v -m faults

# NIXL's wheels also run without CUDA. They require torch, which is here already.
test-direct: setup
	$(BIN)/python -m pip install --quiet --no-deps nixl nixl-cu12
	$(BIN)/python -m pytest -v tests/engines/test_kv_direct.py

# By the Python that has the GPU's torch, not by .venv, which has the CPU's.
test-gpu:
	@$(PYTHON) -m lab.gpu_kit

# The seed makes the cases: the same one makes the same again. It is said first.
fuzz: setup
	@echo "SEED=$(SEED) CASES=$(CASES)"
	FUZZ_SEED="$(SEED)" FUZZ_CASES="$(CASES)" $(BIN)/python -m pytest -q -m fuzz -n 2 --durations=0 \
		--durations-min=1 tests/fuzz

# The router's dashboard in Chromium, which `apt-get install chromium` brings.
test-browser: setup
	$(BIN)/python -m pytest -v -m browser tests/ecshare/router

# The picture of it in the docs.
dashboard-picture: setup
	DASHBOARD_PICTURE=docs/images/dashboard.png $(BIN)/python -m pytest -q \
		tests/ecshare/router/telemetry/test_picture.py

# A fleet of real engines, whose store, engines and router fail again and again.
MINUTES ?= 60
soak: setup
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

# REHEARSE=1: without a version's section in the change log, with the Pythons that are here.
release: setup
	@$(BIN)/python -m scripts.release $(if $(REHEARSE),--rehearse)

test-matrix:
	@$(PYTHON) scripts/matrix.py $(VLLM)

# After a look at what is new; then run everything.
constraints: setup
	$(BIN)/python scripts/write_constraints.py

docs: setup
	$(BIN)/python scripts/write_config_docs.py

monitoring: setup
	$(BIN)/python scripts/write_monitoring.py

# For the other releases, by their Pythons below .cache/matrix.
model-table: setup
	$(BIN)/python -m lab.registry.page

clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
