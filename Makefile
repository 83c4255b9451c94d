# Every target works in a fresh clone; the logic is in scripts/. Arguments: make test ARGS="-k plan"
ARGS ?=

.PHONY: help planner venv extension demo quick test test-versions stress check build-cuda clean
.DEFAULT_GOAL := help

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

planner:  ## make .venv with the `fold3d` command alone: seconds, without torch and Megatron
	@scripts/venv.sh planner

venv:  ## make .venv, install everything into it and build the extension
	@scripts/venv.sh
	@scripts/extension.sh

extension: venv  ## build the C++ scheduler of --preemptive-comm

demo: venv  ## three runs on slow links: stock's default, the strongest stock, --schedule auto
	@.venv/bin/python -m scripts.demo $(ARGS)

quick: venv  ## run the tests that take little time and start no other process; about a minute
	@.venv/bin/python -m pytest -q -n 2 --dist loadfile -m "not (gloo or processes or gpu or search or slow)" $(ARGS)

test: venv  ## run all tests: half an hour on two cores
	@scripts/test.sh $(ARGS)

test-versions: venv  ## make quick and a dozen comparisons with the oldest and the newest torch and Megatron-core
	@.venv/bin/python -m scripts.try_versions $(ARGS) || [ $$? -eq 2 ]

stress: venv  ## fuzz against stock for STRESS_MINUTES, meet faults and restart
	@scripts/stress.sh

check: venv  ## lint, format, types, length of the prose
	@scripts/check.sh

build-cuda:  ## compile what offloading to host memory needs on a GPU; ARCH=all-major by default
	@scripts/build_cuda.sh $(ARCH)

clean:  ## remove caches and outputs, keep .venv
	@rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name .venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
