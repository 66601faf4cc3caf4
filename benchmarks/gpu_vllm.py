"""One run under ten minutes that says whether vLLM is exact on a CUDA machine, and how fast.

    python benchmarks/gpu_vllm.py           `make gpu-vllm`, set-up included
    python benchmarks/gpu_vllm.py --small   on a CPU, to see that it works

First the exactness suite of `tests/test_vllm.py` that goes for all devices, with graphs and
without; then prompts and decoding against stock vLLM as it comes, compiled and with graphs, in
bfloat16. The model is SmolLM2-135M-Instruct, told that it was trained on 2,048 tokens, so that all
texts stretch. Rows are appended to `results/vllm_gpu.csv`. Exits with 1 if a test fails.
"""

import argparse
import os
import subprocess
import sys
import time
from functools import partial

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
import vllm
from common import alternate, row, save
from rows import ROOT
from transformers import AutoConfig
from vllm import LLM, SamplingParams

sys.path.insert(0, str(ROOT / "examples"))
from named_models import folder_of

WINDOW, STEPS = 2048, 32
SIZES = [(length, batch) for length in (4096, 32768) for batch in (1, 16)]
# What goes by the tables that are made for CPUs, or by a CPU's roundings, is left out.
SUITE = "TestExactness and not tables and not few_at_once and not prompts_in_half"


def exact(selection: str) -> bool:
    """Whether the suite passes."""
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "tests/test_vllm.py"]
    return subprocess.run([*command, "-k", selection], cwd=ROOT).returncode == 0


def engine(rope: dict | None, longest: int, batch: int) -> LLM:
    overrides = {"rope_parameters": rope} if rope else {"max_position_embeddings": longest}
    # Two engines side by side.
    memory = {"gpu_memory_utilization": 0.4} if torch.cuda.is_available() else {}
    return LLM(
        folder_of("smollm2"),
        dtype="bfloat16",
        max_model_len=longest,
        max_num_seqs=batch,
        hf_overrides=overrides,
        **memory,
    )


def generate(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    """Milliseconds until all have so many tokens."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return (time.perf_counter() - begin) * 1e3


def measure(llms: dict[str, LLM], window: int, length: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(length + batch)
    # Not of one length: no two share a scale throughout.
    lengths = [length - STEPS - 1 - 37 * index for index in range(batch)]
    prompts = [torch.randint(3, 40000, (one,), generator=generator).tolist() for one in lengths]
    prompt: dict[str, list[float]] = {}
    for name, llm in llms.items():
        llm.reset_prefix_cache()
        prompt[name] = [generate(llm, prompts, 1)]

    def times(tokens: int) -> dict[str, list[float]]:
        runs = {name: partial(generate, llm, prompts, tokens) for name, llm in llms.items()}
        return alternate(runs, samples=3, warm_up=1)

    # From here on the prompts come from the prefix cache, but for the last block of each.
    first, whole = times(1), times(1 + STEPS)
    steps = {name: [(one - min(first[name])) / STEPS for one in whole[name]] for name in llms}
    columns = {"tokens": length, "batch": batch, "dtype": "bfloat16", "unit": "ms"}
    for quantity, samples in (("prompt", prompt), ("decode", steps)):
        rows = [row(name, samples[name], quantity=quantity) for name in llms]
        stock, ours = rows
        ours |= {"ratio": round(stock["median"] / ours["median"], 3), "ratio_of": stock["variant"]}
        note = f"vLLM {vllm.__version__}"
        save("vllm_gpu", rows, model=f"SmolLM2-135M, window {window}", note=note, **columns)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="two tests, and 256 tokens")
    small = parser.parse_args().small
    if not small and not torch.cuda.is_available():
        raise RuntimeError("a CUDA device must be there, got none. Pass --small for a dry run.")
    passed = exact("test_alone or test_unequal" if small else SUITE)
    sizes = [(256, 2)] if small else SIZES
    window = 128 if small else WINDOW
    longest, batch = max(length for length, _ in sizes), max(batch for _, batch in sizes)
    stock = AutoConfig.from_pretrained(folder_of("smollm2"))
    rope = {
        "rope_type": "dynamic_yarn",
        "rope_theta": stock.rope_parameters["rope_theta"],
        "original_max_position_embeddings": window,
        "rescale_every": window // 4,
    }
    llms = {"stock": engine(None, longest, batch), "ours": engine(rope, longest, batch)}
    for llm in llms.values():
        generate(llm, torch.randint(3, 40000, (batch, 100)).tolist(), 4)
    for size in sizes:
        measure(llms, window, *size)
    print("exact" if passed else "NOT EXACT: see the tests above")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
