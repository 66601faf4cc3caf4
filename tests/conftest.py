"""Tiny Llamas with a window of 32 tokens, and what the tests say often."""

import logging
import os
from importlib.util import find_spec

os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs the network
# flash-attn reads these when it is imported: the reference of its Triton backend, on the CPU.
os.environ["FLASH_ATTENTION_TRITON_AMD_ENABLE"] = "TRUE"
os.environ["FLASH_ATTENTION_TRITON_AMD_REF"] = "1"

import pytest
import torch
from oracle import CACHE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_dynyarn import unpatch_llama

# In an environment of its own, see `make test-vllm`.
collect_ignore = [] if find_spec("vllm") else ["test_vllm.py"]
# By name alone, see `make test-kernels`: a process either interprets kernels or compiles them.
collect_ignore += ["test_fused_triton.py", "test_kernels.py"]

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


@pytest.fixture
def model():
    return tiny_llama()


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
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    deprecations = [r.getMessage() for r in caplog.records if "deprecated" in r.getMessage()]
    assert not deprecations
