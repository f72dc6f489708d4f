# The whole of set-up, demo and tests. `make help` lists what there is.
# Everything lives in this folder (.venv, data, logs, airflow.postgres); `make clean` removes it again.

SHELL := /bin/bash
VENV := .venv
PYTHON := $(VENV)/bin/python
# The Python that the virtual environment is made from: 3.11, 3.12 or 3.13.
BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The packages of the virtual environment. `make test-lowest` makes another lock and another environment.
LOCK ?= requirements.lock
export AIRFLOW_HOME := $(CURDIR)
export TZ := UTC

# uv keeps what it downloads below HOME, and fails where nobody can write there.
ifndef UV_CACHE_DIR
ifndef XDG_CACHE_HOME
ifeq ($(shell test -w "$$HOME" && echo yes),)
export UV_CACHE_DIR := $(CURDIR)/.cache/uv
endif
endif
endif

.PHONY: help setup host java lock demo bench soak test-fast test test-all test-versions test-lowest lint fix api docs pictures docs-serve ui spark wheel sbom release-check clean clean-all

# A user's state, and Airflow's runs and connections: nothing can make these again.
KEPT_BY_CLEAN := data airflow.db* airflow.postgres* .airflow-database .jwt-secret .fernet-key simple_auth_manager_passwords.json.generated

help:  ## what can be typed here
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: host java $(VENV)/.ready  ## the Python environment and a Java runtime, if they are missing

$(VENV)/.ready: $(LOCK) requirements-bootstrap.lock pyproject.toml
	@"$(BASE_PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "Cairn needs Python 3.11, 3.12 or 3.13, and found $$("$(BASE_PYTHON)" --version 2>&1 | head -n 1 | grep . || echo none). Install it, or: make BASE_PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@# --clear follows a link, and would empty the environment of another checkout.
	@test ! -L $(VENV) || { echo "$(VENV) is a link to $$(readlink $(VENV)); set that one up where it is, or remove the link"; exit 1; }
	@echo "setting up $(VENV): a minute or two the first time"
	@.ci/with-progress "Python makes the environment" "$(BASE_PYTHON)" -m venv --clear $(VENV)
	@.ci/with-progress "pip installs uv" $(PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-bootstrap.lock
	@# uv trusts its own list of authorities. The second try trusts the machine's, for a network with a proxy that opens TLS.
	@install() { .ci/with-progress "uv installs the packages" $(VENV)/bin/uv pip sync --quiet --python $(PYTHON) --require-hashes --no-build-isolation --compile-bytecode $(LOCK); }; \
	install || UV_SYSTEM_CERTS=true install \
	  || { echo "uv could not install the packages; trying pip (slower)"; \
	       .ci/with-progress "pip installs the packages" $(PYTHON) -m pip install --quiet --require-hashes --no-build-isolation -r $(LOCK); }
	@.ci/with-progress "uv installs Cairn" $(VENV)/bin/uv pip install --quiet --offline --python $(PYTHON) --no-deps --no-build-isolation -e .
	@# What the build leaves names the package a second time wherever this folder is on the path, and Airflow would load its plugins twice.
	@rm -rf *.egg-info
	@# The pipelines in jobs/pipelines belong to this folder and not to the package, so that a wheel does not bring them.
	@echo "$(CURDIR)/jobs" > "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cairn-pipelines.pth"
	@touch $@

# Before anything is downloaded. A base Python that is missing is reported below.
host:
	@test "$(HOST_CHECK)" = no || ! "$(BASE_PYTHON)" -c '' 2>/dev/null || "$(BASE_PYTHON)" jobs/local_stack/host_check.py

java:
	@.ci/java

# uv, and what it asks of pyproject.toml: all extras but celery, which tests/support/celery.lock pins, and all groups.
COMPILE := $(VENV)/bin/uv pip compile --quiet --universal --generate-hashes --no-annotate --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)
EXTRAS := $(addprefix --extra ,airflow spark spark-classic gcs s3 azure delta iceberg postgres bigquery openlineage validation)
GROUPS := $(addprefix --group ,dev examples database docs build)

lock: setup  ## both lock files from pyproject.toml; versions stay where they fit (UPGRADE=1: the newest versions)
	@$(COMPILE) $(EXTRAS) $(GROUPS) pyproject.toml --output-file requirements.lock
	@printf 'pip\nsetuptools\nuv\nwheel\n' | $(COMPILE) --constraint requirements.lock --output-file requirements-bootstrap.lock -

demo: setup  ## the main job: real flights through Airflow, Spark and RocksDB (DAYS=14)
	@$(PYTHON) -m local_stack.demo

bench: setup  ## ours beside Spark's own state; benchmarks/out/report.json and a table (SCALE=small to try it)
	@$(PYTHON) -m benchmarks.suite --scale $(or $(SCALE),full) $(BENCH_ARGS)

soak: setup  ## weeks of flights, disturbed every few days, against pandas (DAYS=60 SEED=1); then 200 corrected inputs
	@$(PYTHON) -m tests.soak
	@$(PYTHON) -m tests.corrections

# Tests start hundreds of processes: each would compile Cairn again where this variable is set.
# RESULTS: a file for the results in the XML that CI systems read.
# A worker that died would run its test again and die again, without end: the run ends instead, and names the test.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -n $(or $(WORKERS),3) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder $(addprefix --junit-xml=,$(RESULTS))

# Few of these tests wait. A third process would only import everything once more.
test-fast: WORKERS ?= 2
test-fast: setup  ## the tests that need neither Spark nor Airflow, with few examples
	@CAIRN_TESTS=fast $(PYTEST) $(or $(PYTEST_ARGS),$(addprefix tests/,unit property contract scenarios architecture))

# Tests start many JVMs. Without the archive they only take longer.
$(VENV)/.spark-classes: $(VENV)/.ready
	@.ci/with-progress "Spark's classes are archived, for faster starts" $(VENV)/bin/cairn spark --prepare || true
	@touch $@

test: setup $(VENV)/.spark-classes  ## each rule once, end to end
	@CAIRN_TESTS=ci $(PYTEST) $(PYTEST_ARGS)

# A second run of the same commit goes on where the first one stopped. A part begins no test after 50 minutes, and ends within 80.
test-all: setup $(VENV)/.spark-classes  ## all tests, long ones too; run again, it leaves out tests that passed on this commit (PART=1, then PART=2, …: 80 minutes each)
	@test -z "$(PART)" || test -z "$$(git status --porcelain)" || { \
	  echo "A part notes which tests passed on this commit, and there are changes that no commit has. Commit them, then: make test-all PART=$(PART)"; exit 1; }
	@CAIRN_TESTS=all CAIRN_PART=$(PART) CAIRN_PASSED=$(CURDIR)/.cache/passed $(PYTEST) $(PYTEST_ARGS)

test-versions: setup $(VENV)/.spark-classes  ## tests under PySpark 4.0 to 4.3 and Airflow 3.1 to 3.3 (VERSIONS="pyspark-4.1.4 airflow-3.2.2" SHORT=1: few)
	@PYTHONDONTWRITEBYTECODE= $(PYTHON) -m tests.versions

.cache/lowest.lock: requirements.lock pyproject.toml | setup
	@mkdir -p .cache
	@$(VENV)/bin/uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header --resolution lowest-direct \
	  --constraint <($(PYTHON) -m tests.tools.indirect) $(EXTRAS) $(GROUPS) pyproject.toml --output-file $@

test-lowest: .cache/lowest.lock  ## the tests of test-fast with the lowest versions that pyproject.toml allows
	@$(MAKE) --no-print-directory test-fast VENV=.cache/lowest LOCK=.cache/lowest.lock

lint: setup  ## style, types, and which floor may import which
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

fix: setup  ## repairs what lint refuses of the style; types and imports stay yours
	@$(VENV)/bin/ruff check --fix --exit-zero --quiet .
	@$(VENV)/bin/ruff format --quiet .

docs: setup  ## the docs site in site/: open site/index.html
	@$(VENV)/bin/zensical build --clean --strict

api: setup  ## the tables in docs/settings.md, from the code
	@$(PYTHON) -m tests.support.settings_page

pictures: setup  ## the pictures of the Checkpoints pages in docs/; needs Chromium
	@$(PYTHON) -m tests.tools.pictures docs

docs-serve: setup  ## the docs site on http://127.0.0.1:8000, built again when a page changes, until Ctrl-C (DOCS_PORT=8000)
	@$(VENV)/bin/zensical serve --dev-addr 127.0.0.1:$(or $(DOCS_PORT),8000)

ui: setup  ## Airflow with its UI on http://127.0.0.1:8080, until Ctrl-C (PORT=8080)
	@umask 077 && PORT=$(PORT) $(PYTHON) -m local_stack.ui

spark: setup  ## a Spark Connect server on sc://127.0.0.1:15002, until Ctrl-C (SPARK_PORT=15002)
	@$(VENV)/bin/cairn spark --port $(or $(SPARK_PORT),15002)

wheel: setup  ## dist/cairn_state-….whl, to install on other hosts
	@$(VENV)/bin/uv build --quiet --offline --wheel --no-build-isolation --python $(PYTHON) --out-dir dist .
	@# As after set-up: Airflow would load the plugins twice.
	@rm -rf build *.egg-info

sbom: setup  ## sbom.json: the installed packages, with versions and licences, in CycloneDX
	@$(PYTHON) .ci/sbom > sbom.json

release-check: setup  ## builds both archives, checks their metadata, and runs README's pipeline with each on each Python (PYTHONS="3.11 3.12 3.13")
	@.ci/release-check

clean:  ## removes what set-up, demo and tests make again; your state and Airflow's database stay
	@rm -rf $(VENV) dist site sbom.json logs data/demo data/soak data/flights data/weather .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse state_backend/values/_version.py
	@rmdir data 2>/dev/null || true  # only if it is empty
	@left="$$(ls -d $(KEPT_BY_CLEAN) 2>/dev/null | tr '\n' ' ')"; test -z "$$left" || echo "kept: $${left}('make clean-all' removes these too)"

clean-all:  ## removes your state and Airflow's database too, after you confirm (YES=1: without asking)
	@left="$$(ls -d $(KEPT_BY_CLEAN) 2>/dev/null | tr '\n' ' ')"; \
	if [ -n "$$left" ] && [ "$(YES)" != 1 ]; then \
	  printf 'This deletes %sfor good. Type yes to go on: ' "$$left"; read -r answer || answer=; \
	  [ "$$answer" = yes ] || { echo "nothing was deleted; 'make clean-all YES=1' does not ask"; exit 1; }; \
	fi
	@$(MAKE) --no-print-directory clean >/dev/null
	@rm -rf $(KEPT_BY_CLEAN)
