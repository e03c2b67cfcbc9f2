# Two commands do everything on a fresh machine: `make demo` and `make test`. The rest is for developers.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCKS := requirements/runtime.lock requirements/nixl.lock requirements/kube.lock requirements/dev.lock
COMPILED := setup.py $(wildcard epp/*/_*.pyx epp/*/_*.pxi epp/*/_*.h)
STAMP := $(VENV)/.installed-$(shell cat $(LOCKS) $(COMPILED) pyproject.toml 2>/dev/null | sha256sum | cut -c1-16)
SOURCES := epp sidecar engine_plugin deploy simulator tests benchmarks setup.py

# UCX listens on every interface unless told otherwise; everything local stays on loopback
export UCX_NET_DEVICES ?= lo
export UCX_TLS ?= tcp

.PHONY: demo up test test-unit test-engine test-cluster lint format chart image lock soak bench clean

ENGINE ?= emulated

demo: $(STAMP)  ## the scenario on a fleet of three engines, as a table; ENGINE=vllm: real vLLM on the CPU
	@test $(ENGINE) != vllm || PYTHON=$(PYTHON) sh requirements/vllm-setup.sh
	@$(BIN)/python -m deploy.local demo --engine $(ENGINE)

up: $(STAMP)  ## start the fleet and leave it running
	@$(BIN)/python -m deploy.local up

test: $(STAMP)  ## unit, integration, and the whole scenario
	$(BIN)/python -m pytest -q tests --ignore tests/engine

test-unit: $(STAMP)
	$(BIN)/python -m pytest -q tests/unit

test-engine: $(STAMP)  ## the same against a real vLLM on the CPU (made in .venv-vllm); KVPULL_RECORD_PARITY=1 records
	@PYTHON=$(PYTHON) sh requirements/vllm-setup.sh
	$(BIN)/python -m pytest -q tests/engine

test-cluster: $(STAMP)  ## tests/integration/cluster; in the real cluster of KUBECONFIG if KVPULL_TEST_CLUSTER names its context
	$(BIN)/python -m pytest -q tests/integration/cluster

lint: $(STAMP)  ## ruff, mypy --strict, import contracts, Dockerfile
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

chart: $(STAMP)  ## schema and README of the chart, status column of docs/migration.md
	$(BIN)/python -m deploy.helm.describe
	$(BIN)/python -m deploy.helm.migration

format: $(STAMP)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

image: $(STAMP)  ## build both images with buildah, start and probe them (root; exit status 2: tools are missing)
	$(BIN)/python -m deploy.image

soak: $(STAMP)  ## reliability under load and faults, with figures
	$(BIN)/python -m benchmarks.soak
	$(BIN)/python -m benchmarks.soak_sidecar --requests 50000 --clients 150
	$(BIN)/python -m benchmarks.soak_transport
	$(BIN)/python -m deploy.image || [ $$? -eq 2 ]

bench: $(STAMP)  ## make bench NAME=x runs benchmarks/x.py
	$(BIN)/python -m benchmarks.$(NAME)

lock:  ## rewrite requirements/*.lock from *.in (needs uv)
	sh requirements/lock.sh

$(STAMP): $(LOCKS) $(COMPILED) pyproject.toml requirements/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) sh requirements/setup.sh
	@rm -f $(VENV)/.installed-*
	@touch $@

clean:
	rm -rf $(VENV) .venv-vllm out build *.egg-info
