"""What the benchmarks share: models, filled caches, alternating timers, and rows of results.

A row is one variant under one set of conditions. Variants that are compared run in one process and
take turns, since the machine's speed drifts; what counts is the ratio within a row's run.
"""

import copy
import csv
import datetime
import inspect
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rows import RESULTS, ROOT
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

from hf_dynyarn import DynamicYaRNCache, DynamicYaRNConfig, patch_llama
from hf_dynyarn.resolve import resolve_schedule

COLUMNS = (
    "run",  # rows of one run share this: the date and time it began
    "model",
    "variant",
    "tokens",  # in the cache, or read
    "batch",
    "dtype",
    "quantity",
    "unit",
    "median",
    "mean",
    "p20",
    "p80",
    "samples",
    "ratio",  # of the rival's `ratio_of` to ours, so that more than 1 means ours is better
    "ratio_of",
    "device",
    "threads",
    "torch",
    "transformers",
    "commit",
    "note",
)
RUN = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(LlamaForCausalLM.forward).parameters
)


def named(model: str, dtype: torch.dtype):
    """One of the models of `examples/named_models.py`."""
    sys.path.insert(0, str(ROOT / "examples"))
    from named_models import folder_of

    return AutoModelForCausalLM.from_pretrained(folder_of(model), dtype=dtype).eval()


def smollm2(dtype: torch.dtype, layers: int | None = None, rope: dict | None = None):
    """SmolLM2-135M-Instruct, or its first layers, with other rope parameters where given."""
    model = named("smollm2", dtype)
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    return with_rope(model, rope) if rope else model


def random_llama(dtype: torch.dtype, window: int, rope: dict | None = None, **shape):
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=window, vocab_size=1024, **shape)
    model = LlamaForCausalLM(config).to(dtype).eval()
    return with_rope(model, rope) if rope else model


def twin_of(model):
    """A copy of a model that shares its weights, but not its config."""
    # What a copy meets in `memo` it takes to be copied already.
    return copy.deepcopy(model, memo={id(weight): weight for weight in model.parameters()})


def with_rope(model, rope: dict):
    """The same weights (not copied) under other rope parameters, as stock transformers has them.

    Of a model whose layers with a window have parameters of their own, these stay.
    """
    twin = twin_of(model)
    config = twin.config
    stock = getattr(config, "rope_parameters", None)
    if stock is None:  # transformers 4
        config.rope_scaling = rope
    elif "full_attention" in stock:
        theta = stock["full_attention"]["rope_theta"]
        config.rope_parameters = {**stock, "full_attention": {"rope_theta": theta, **rope}}
    else:
        config.rope_parameters = {"rope_theta": stock["rope_theta"], **rope}
    twin.model.rotary_emb = type(model.model.rotary_emb)(config)
    return twin


def static_yarn(window: int, factor: float = 4.0) -> dict:
    """Rope parameters of what people run today."""
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": window,
    }


def stock_cache(
    model: LlamaForCausalLM, tokens: int, batch: int = 1, max_cache_len: int | None = None
) -> DynamicCache | StaticCache:
    """A cache of random keys and values: what a step costs does not depend on them.

    With `max_cache_len` it is of fixed size.
    """
    cache = DynamicCache()
    if max_cache_len is not None:
        cache = StaticCache(config=model.config, max_cache_len=max_cache_len)
    for index, states in enumerate(random_states(model, tokens, batch)):
        cache.update(*states, index)
    return cache


def our_cache(
    model: LlamaForCausalLM,
    tokens: int,
    batch: int = 1,
    mask: torch.Tensor | None = None,
    config: DynamicYaRNConfig | None = None,
    **options: bool | int,
) -> DynamicYaRNCache:
    """The same for a patched model. `mask` `(B, tokens)` says what is padding.

    With `max_cache_len` it is of fixed size; its buffers are filled as a prefill would.
    """
    cache = DynamicYaRNCache(**options)
    positions = torch.arange(tokens).expand(batch, -1)
    if mask is not None:
        positions = torch.where(mask.bool(), mask.cumsum(-1) - 1, -1)
    positions = positions.to(model.device)
    if "max_cache_len" in options:
        cache.place(positions, mask, None, None)
    # Stands for a call of the model.
    forward = type("Forward", (), {"new": positions, "held": positions[:, :0]})()
    cache.begin(forward)
    for index, states in enumerate(random_states(model, tokens, batch)):
        cache.update(*states, index)
    schedule = resolve_schedule(model.config, config or DynamicYaRNConfig())
    cache.commit(positions, schedule, packed=False)
    return cache


def random_states(model: LlamaForCausalLM, tokens: int, batch: int):
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (batch, config.num_key_value_heads, tokens, dim)
    for _ in range(config.num_hidden_layers):
        yield [torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2)]


def patched(model: LlamaForCausalLM, **options) -> LlamaForCausalLM:
    """The same weights (not copied) in a patched model beside the stock one."""
    twin = twin_of(model)
    patch_llama(twin, **options)
    return twin


def step(model: LlamaForCausalLM, cache, batch: int = 1, mask: torch.Tensor | None = None):
    """A function that decodes one token. A mask grows by one column at each."""
    token = torch.full((batch, 1), 5, device=model.device)
    grown = [mask]

    @torch.inference_mode()
    def run() -> None:
        kwargs = {CACHE: cache}
        if grown[0] is not None:
            grown[0] = torch.nn.functional.pad(grown[0], (0, 1), value=1)
            kwargs["attention_mask"] = grown[0]
        model(token, **kwargs)

    return run


def alternate(
    runs: dict[str, Callable[[], object]], samples: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Milliseconds of each run of each variant, the variants taking turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(warm_up + samples):
        for name, run in runs.items():
            synchronize()
            began = time.perf_counter()
            run()
            synchronize()
            if index >= warm_up:
                times[name].append((time.perf_counter() - began) * 1e3)
    return times


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copy_bandwidth(device: str = "cpu") -> float:
    """Bytes per second that a large copy reads, the most that a step could."""
    source = torch.ones(64 * 2**20, device=device)  # 256 MiB
    target = torch.empty_like(source)
    times = alternate({"copy": lambda: target.copy_(source)}, samples=7)["copy"]
    return source.nbytes / (min(times) / 1e3)


def matmul_rate() -> float:
    """Floating-point operations per second of a large float32 product, the most a call could do."""
    left, right = torch.randn(2, 2048, 2048)
    times = alternate({"product": lambda: left @ right}, samples=7)["product"]
    return 2 * 2048**3 / (min(times) / 1e3)


def bytes_per_token(model: LlamaForCausalLM) -> int:
    """Bytes of one token's keys and values, in all layers."""
    states = next(iter(random_states(model, 1, 1)))
    return model.config.num_hidden_layers * sum(one.nbytes for one in states)


def least_bytes(model: LlamaForCausalLM, tokens: int) -> int:
    """Bytes that a decoding step must read: the weights once, and all keys and values."""
    return sum(weight.nbytes for weight in model.parameters()) + tokens * bytes_per_token(model)


def least_operations(model: LlamaForCausalLM, tokens: int) -> int:
    """Floating-point operations of reading a text in one call.

    A multiplication and an addition for each weight and token, and for each number of the keys and
    values that each query sees.
    """
    weights = sum(weight.numel() for weight in model.model.layers.parameters())
    seen = tokens * (tokens + 1) // 2 * model.config.hidden_size * model.config.num_hidden_layers
    return 2 * (weights * tokens + 2 * seen)


def row(variant: str, samples: list[float], **columns) -> dict:
    """A row of the median, mean and quantiles of samples."""
    ordered = sorted(samples)
    position = [round(share * (len(ordered) - 1)) for share in (0.2, 0.8)]
    values = {
        "median": statistics.median(samples),
        "mean": statistics.mean(samples),
        "p20": ordered[position[0]],
        "p80": ordered[position[1]],
    }
    rounded = {name: float(f"{value:.5g}") for name, value in values.items()}
    rounded["samples"] = len(samples)
    return {"variant": variant, **rounded, **columns}


def save(bench: str, rows: list[dict], **columns) -> None:
    """Appends rows to `results/<bench>.csv` and shows them."""
    common = {
        "run": RUN,
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": git_commit(),
    }
    path = RESULTS / f"{bench}.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if is_new:
            writer.writeheader()
        for one in rows:
            writer.writerow({**common, **columns, **one})
            shown = {**columns, **one}
            ratio = f"  x{shown['ratio']:.2f}" if shown.get("ratio") else ""
            print(
                f"{bench:8} {shown['model']:24} {shown['dtype']:9} {shown['tokens']:>6} tokens  "
                f"{shown['variant']:28} {shown['median']:10.4g} {shown['unit']}{ratio}",
                flush=True,
            )


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return names[0].split(":")[1].strip() if names else platform.processor()


def git_commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
