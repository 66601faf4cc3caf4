"""Tiny Llamas with a window of 32 tokens, and what the tests say often."""

import logging
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs the network
# flash-attn reads these when it is imported: the reference of its Triton backend, on the CPU.
os.environ["FLASH_ATTENTION_TRITON_AMD_ENABLE"] = "TRUE"
os.environ["FLASH_ATTENTION_TRITON_AMD_REF"] = "1"

import pytest
import torch
from oracle import CACHE, llama_logits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_dynyarn import DynamicYaRNCache, unpatch_llama
from hf_dynyarn.masks import Masks
from hf_dynyarn.plan import make_plan
from hf_dynyarn.schedules import YaRNSchedule

# In an environment of its own, see `make test-vllm`.
collect_ignore = [] if find_spec("vllm") else ["test_vllm.py"]
collect_ignore += [] if find_spec("vllm") else ["test_vllm_features.py", "test_vllm_versions.py"]
# By name alone, see `make test-kernels`: a process either interprets kernels or compiles them.
collect_ignore += ["test_fused_triton.py", "test_interpreted.py", "test_kernels.py"]
collect_ignore += ["test_pages.py", "test_vllm_fused.py", "test_vllm_fused_drafts.py"]

# Models this small only lose by threads, which wait for each other.
torch.set_num_threads(1)

WINDOW = 32
VOCABULARY = 97

# Largest difference of two float32 computations of the same logits, which are about 2 in size.
ROUNDING = 2e-5


def tiny_config(**changes):
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": WINDOW,
        # Large enough for attention to be sharp, so that a wrong rotation shows.
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaConfig(**{**options, **changes})


def tiny_llama(seed=0, attn_implementation="sdpa", **changes):
    torch.manual_seed(seed)
    config = tiny_config(**changes)
    config._attn_implementation = attn_implementation
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = (
        -1
    )  # never drawn, so that every text has the length asked for
    return model


def random_ids(length, rows=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator)


TEXT = random_ids(90)


def logits_of(model, ids, cache=None, **kwargs):
    """Logits (B, T, V) of one call, without gradients."""
    if cache is not None:
        kwargs[CACHE] = cache
    with torch.no_grad():
        return model(ids, **kwargs).logits


def generate(model, ids, cache=None, new_tokens=40, **kwargs):
    """New tokens (B, new_tokens), greedy unless told otherwise."""
    if cache is not None:
        kwargs[CACHE] = cache
    if ids is not None:
        kwargs.setdefault(
            "attention_mask", torch.ones_like(ids)
        )  # not guessed from tokens that look like padding
    output = model.generate(ids, max_new_tokens=new_tokens, **{"do_sample": False, **kwargs})
    return output[:, 0 if ids is None else ids.shape[1] :]


def in_chunks(model, ids, sizes, cache=None, **kwargs):
    """Logits of all of `ids`, fed to one cache in chunks of these sizes."""
    cache = DynamicYaRNCache() if cache is None else cache
    return torch.cat(
        [logits_of(model, chunk, cache, **kwargs) for chunk in ids.split(sizes, dim=1)], 1
    )


def filled(model, ids=TEXT[:, :40], cache=None, **kwargs):
    """The cache, or a new one, with these tokens in it."""
    cache = DynamicYaRNCache() if cache is None else cache
    logits_of(model, ids, cache, **kwargs)
    return cache


def greedy_by_oracle(model, prompt, new_tokens, step):
    tokens = prompt.tolist()
    for _ in range(new_tokens):
        tokens.append(int(llama_logits(model, tokens, WINDOW, step)[-1].argmax()))
    return torch.tensor(tokens[len(prompt) :])


def left_padded(rows):
    """Token ids (B, T) and mask (B, T) of rows of unequal length."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
    return ids, mask


def assert_close(actual, expected, tolerance=ROUNDING):
    difference = (
        (torch.as_tensor(actual).double() - torch.as_tensor(expected).double()).abs().max().item()
    )
    assert difference <= tolerance, f"largest difference {difference:.2e} > {tolerance:.0e}"


def assert_same(actual, expected):
    """Two caches hold the same bits under the same options."""
    assert actual.schedule == expected.schedule
    assert (actual.packed, actual.rotated_copy) == (expected.packed, expected.rotated_copy)
    assert actual.get_seq_length() == expected.get_seq_length()
    assert actual.scales == expected.scales
    assert len(actual.layers) == len(expected.layers)
    assert (actual.positions is None) == (expected.positions is None)
    if actual.positions is not None:
        assert torch.equal(actual.positions, expected.positions)
    for own, theirs in zip(actual.layers, expected.layers, strict=True):
        for name in ("keys", "values"):
            mine, other = getattr(own, name), getattr(theirs, name)
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other)


def assert_holds(cache, model, ids, seed=5):
    """The cache goes on as if it had been filled with `ids`."""
    more = random_ids(20, rows=len(ids), seed=seed)
    expected = logits_of(model, torch.cat((ids, more), 1), use_cache=False)[:, -20:]
    assert_close(in_chunks(model, more, 6, cache), expected)
    assert cache.positions.shape == (len(ids), cache.layers[0].keys.shape[2])


def traces(model):
    """Everything about a model that a patch could leave behind."""
    return {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "hooks": [
            (
                len(module._forward_pre_hooks),
                len(module._forward_hooks),
                len(module._forward_hooks_with_kwargs),
            )
            for module in model.modules()
        ],
        "configs": [
            module.config is model.config for module in model.modules() if hasattr(module, "config")
        ],
        "attention": model.config._attn_implementation,
        "state": list(model.state_dict()),
        "class": "__call__" in vars(PreTrainedModel),
    }


def yarn_schedule(window=32, step=1, dim=16, base=10000.0, **options):
    return YaRNSchedule(
        rotary_dim=dim,
        rope_theta=base,
        original_max_position_embeddings=window,
        rescale_every=step,
        **options,
    )


SCHEDULE = yarn_schedule(step=8)


def plan_for(length, cache=None, mask=None, position_ids=None, backend="sdpa", rows=1):
    """The plan of a call, of which only the sizes matter."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    return make_plan(SCHEDULE, cache, ids, mask, position_ids, backend, False)


def held(positions, packed=False):
    """A cache that holds positions, and no keys yet."""
    cache = DynamicYaRNCache()
    cache.begin(SCHEDULE)  # which stands for a call
    cache.commit(torch.tensor(positions), SCHEDULE, packed)
    return cache


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture(params=[True, False], ids=["rotated copy", "no copy"])
def new_cache(request):
    """Makes caches with or without a rotated copy, which must not differ in anything but cost."""
    return partial(DynamicYaRNCache, rotated_copy=request.param)


def by_file(cache, tmp_path):
    cache.save(tmp_path / "cache.safetensors")
    return DynamicYaRNCache.load(tmp_path / "cache.safetensors")


def by_torch_save(cache, tmp_path):
    torch.save(cache.state_dict(), tmp_path / "cache.pt")
    return DynamicYaRNCache.from_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))


def by_state_dict(cache, tmp_path):
    return DynamicYaRNCache.from_state_dict(cache.state_dict())


@pytest.fixture(params=[by_file, by_torch_save, by_state_dict])
def travelled(request, tmp_path):
    """Sends a cache on a journey and returns the one that arrives."""
    return lambda cache: request.param(cache, tmp_path)


@pytest.fixture
def benchmarks(monkeypatch):
    """The modules of `benchmarks/` can be imported."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "benchmarks")


@pytest.fixture
def results(benchmarks, tmp_path, monkeypatch):
    """The folder in which benchmarks find and leave their rows."""
    import common
    import rows

    for module in (common, rows):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


@pytest.fixture
def masks_built(monkeypatch):
    """Shapes of the masks that were built."""
    shapes = []

    def recording(build):
        def recorded(self, *args):
            mask = build(self, *args)
            shapes.append(tuple(mask.shape))
            return mask

        return recorded

    for name in ("of", "tail"):
        monkeypatch.setattr(Masks, name, recording(getattr(Masks, name)))
    return shapes


def word_tokenizer():
    """A word for each token: token 5 is "w5"."""
    words = Tokenizer(
        models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w1")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")


@pytest.fixture
def tokenizer():
    return word_tokenizer()


@pytest.fixture(autouse=True)
def stock_again():
    """No test leaves a patch behind."""
    yield
    unpatch_llama()


@pytest.fixture(autouse=True)
def no_deprecation_logged(caplog):
    """Some removals come as warnings (errors here, see pyproject.toml), others in the log."""
    logger = logging.getLogger("transformers")
    if not logger.propagate:  # as it does where the environment says CI
        logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    deprecations = [r.getMessage() for r in caplog.records if "deprecated" in r.getMessage()]
    assert not deprecations
