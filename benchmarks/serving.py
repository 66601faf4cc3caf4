"""What Dynamic YaRN costs in vLLM: prompts and decoding against stock vLLM, in one process.

    python benchmarks/serving.py                     in the environment of `make test-vllm`
    python benchmarks/serving.py --dtypes bfloat16   of one type

The model is SmolLM2-135M-Instruct, told that it was trained on 1,024 tokens, so that longer texts
stretch, each request at a scale of its own. Rows are appended to `results/serving.csv`: of prompts
the milliseconds until the first token of all requests, of decoding those of one step, and for the
longest batch where the time of a step goes.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "3",  # GiB for each engine: the longest batch in float32
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
import vllm
from common import alternate, row, save
from rows import ROOT
from transformers import AutoConfig
from vllm import LLM, SamplingParams

from hf_dynyarn.vllm import backend, kernels, metadata

sys.path.insert(0, str(ROOT / "examples"))
from named_models import folder_of

WINDOW, LONGEST, STEPS = 1024, 8192, 16
SIZES = [(length, batch) for length in (1024, 4096, 8192) for batch in (1, 8)]
PROFILED = (4096, 8)


def engine(dtype: str, rope: dict | None) -> LLM:
    return LLM(
        folder_of("smollm2"),
        dtype=dtype,
        max_model_len=LONGEST,
        max_num_batched_tokens=2048,
        max_num_seqs=8,
        hf_overrides={"rope_parameters": rope} if rope else {},
    )


def generate(llm: LLM, prompts: list[list[int]], tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def milliseconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def measure(llms: dict[str, LLM], length: int, batch: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(length + batch)
    # Not of one length, nor with one beginning: no two share blocks, and few a scale.
    lengths = [length - STEPS - 1 - 37 * index for index in range(batch)]
    prompts = [torch.randint(3, 40000, (one,), generator=generator).tolist() for one in lengths]
    prompt: dict[str, list[float]] = {}
    for name, llm in llms.items():
        llm.reset_prefix_cache()
        prompt[name] = [milliseconds(partial(generate, llm, prompts, 1))]

    def times(tokens: int) -> dict[str, list[float]]:
        runs = {name: partial(generate, llm, prompts, tokens) for name, llm in llms.items()}
        return alternate(runs, samples=3, warm_up=0)

    # From here on the prompts come from the prefix cache, but for the last block of each.
    first, whole = times(1), times(1 + STEPS)
    steps = {name: [(one - min(first[name])) / STEPS for one in whole[name]] for name in llms}
    for quantity, samples in (("prompt", prompt), ("decode", steps)):
        rows = [row(name, samples[name], quantity=quantity) for name in llms]
        stock, ours = rows
        ours |= {"ratio": round(stock["median"] / ours["median"], 3), "ratio_of": stock["variant"]}
        write(rows, length, batch, dtype)
    if (length, batch) == PROFILED:
        write(profile(llms["ours"], prompts), length, batch, dtype)


def profile(llm: LLM, prompts: list[list[int]]) -> list[dict]:
    """Where the time of decoding goes, as rows per step."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable) -> Callable:
        @wraps(function)
        def call(*args, **kwargs):
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            spent[name] += time.perf_counter() - begin
            return result

        return call

    places = {
        "logits of rotated keys": (kernels, "_scores"),
        "weighted values": (kernels, "_weigh"),
        "attention in all": (backend.DynamicYaRNAttention, "forward"),
        "writing the cache": (backend.DynamicYaRNAttention, "do_kv_cache_update"),
        "sorting queries, tables": (metadata.DynamicYaRNMetadataBuilder, "build"),
    }
    stock = {name: getattr(owner, attribute) for name, (owner, attribute) in places.items()}
    generate(llm, prompts, 1)
    try:
        for name, (owner, attribute) in places.items():
            setattr(owner, attribute, timed(name, stock[name]))
        first = milliseconds(lambda: generate(llm, prompts, 1))
        before = dict(spent)
        whole = milliseconds(lambda: generate(llm, prompts, 1 + STEPS)) - first
    finally:
        for name, (owner, attribute) in places.items():
            setattr(owner, attribute, stock[name])
    # The second call had the first token too.
    parts = {name: (spent[name] - 2 * before.get(name, 0.0)) * 1e3 for name in places}
    return [
        row("ours", [value / STEPS], quantity=f"decode, {name}")
        for name, value in {"the whole step": whole, **parts}.items()
    ]


def write(rows: list[dict], length: int, batch: int, dtype: str) -> None:
    note = f"vLLM {vllm.__version__}"
    columns = {"tokens": length, "batch": batch, "dtype": dtype, "unit": "ms", "note": note}
    save("serving", rows, model="SmolLM2-135M, window 1024", **columns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    theta = AutoConfig.from_pretrained(folder_of("smollm2")).rope_parameters["rope_theta"]
    rope = {
        "rope_type": "dynamic_yarn",
        "rope_theta": theta,
        "original_max_position_embeddings": WINDOW,
        "rescale_every": 256,
    }
    kept = []  # vLLM shuts down all engines of a process with the first that goes
    warm_up = torch.randint(3, 40000, (8, 300)).tolist()
    for dtype in parser.parse_args().dtypes:
        llms = {"stock": engine(dtype, None), "ours": engine(dtype, rope)}
        for llm in llms.values():
            generate(llm, warm_up[:1], 2)
            generate(llm, warm_up, 2)
        for length, batch in SIZES:
            measure(llms, length, batch, dtype)
        kept.append(llms)


if __name__ == "__main__":
    main()
