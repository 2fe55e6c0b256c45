# Every command of this repository. `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup serve demo storm smoke test lint format tree refresh check bench bench-resize bench-reserve bench-driver kernels bench-kernel image image-test plan-study plan-accuracy lock clean

PY := .venv/bin/python
export MODEL HOST PORT ELASTIC

help: ## List the commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with the pinned, patched engine and the tools
	@scripts/setup

serve: ## Serve a model with the elastic KV cache (MODEL=, HOST=, PORT=, ELASTIC=off, ARGS='...' for vllm serve)
	@scripts/serve $(ARGS)

demo: setup ## Watch a server grow and shrink its cache under load
	@scripts/demo $(ARGS)

storm: setup ## Storm a server: 32 clients, a resize four times a second (ARGS='...' for scripts/storm)
	@scripts/storm $(ARGS)

smoke: ## Tell within minutes whether a server works, on a GPU or a CPU (ARGS='...' for scripts/smoke)
	@scripts/smoke $(ARGS)

image: ## Build a container image (TARGET=cpu or cuda, ARGS='...' for scripts/image build)
	@scripts/image build $(or $(TARGET),cpu) $(ARGS)

image-test: setup ## Run the cpu image that was built, alone and as two nodes: it answers, resizes, drains and stops
	@ELASTIC_KV_IMAGE=$$(scripts/image names | head -n 1) $(PY) -m pytest tests/image $(ARGS)

test: ## Run all tests (ARGS='...' for pytest)
	@scripts/test $(ARGS)

lint: setup ## Check style, types, shell scripts and spelling
	@scripts/lint

format: setup ## Bring the Python files into the house style
	@$(PY) -m ruff check --fix-only . && $(PY) -m ruff format .

tree: ## Make .tree, an upstream checkout with one commit per patch
	@scripts/patchset tree $(ARGS)

refresh: ## Write the commits of .tree back to patches/
	@scripts/patchset refresh

check: ## Check the patch series
	@scripts/patchset check

bench: setup ## Run the benchmarks (ARGS='...' for scripts/bench)
	@scripts/bench $(ARGS)

bench-resize: setup ## Measure what a resize costs while requests decode (ARGS=--quick for less)
	@scripts/bench resize $(ARGS)

bench-reserve: setup ## Compare the policies of the prefill reserve under a memory budget (ARGS=--quick for less)
	@scripts/bench reserve $(ARGS)

bench-driver: setup ## Count and time a GPU driver's calls (without a GPU: times as published)
	@scripts/bench driver $(ARGS)

bench-kernel: setup ## Time the decode kernel against others on a GPU; skips without one (ARGS=--quick for less)
	@scripts/kernels bench $(ARGS)

kernels: setup ## Compile the attention kernels for every GPU target and judge them (ARGS='...' for scripts/kernels)
	@scripts/kernels $(ARGS)

plan-study: setup ## More GPUs or a smaller cache: the planner's sweep beside the paper's claims, into docs/results
	@scripts/plan study $(ARGS)

plan-accuracy: setup ## The planner against published measurements, into docs/results
	@scripts/plan accuracy $(ARGS)

lock: setup ## Resolve configs/requirements and the pins into configs/locks (ARGS=--upgrade for newer versions)
	@PYTHONPATH=scripts $(PY) -m elastic_tools.lock $(ARGS)

clean: ## Remove everything that was made: .venv, .cache, .tree
	@rm -rf .venv .cache .tree .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
