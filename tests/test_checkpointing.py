"""Layers that run again in the backward pass, though no model or config says so."""

from functools import partial

import pytest
import torch
from conftest import CACHE, WINDOW, assert_close, logits_of, random_ids, tiny_llama
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_dynyarn import DynamicYaRNCache, patch_llama

LONG = random_ids(70, rows=2)


def by_wrapper(model, impl):
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=impl),
        check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
    )


def by_hand(model):
    """As training scripts do it: each layer's forward is replaced."""
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


ways = pytest.mark.parametrize(
    "checkpointed",
    [
        partial(by_wrapper, impl=CheckpointImpl.NO_REENTRANT),
        partial(by_wrapper, impl=CheckpointImpl.REENTRANT),
        by_hand,
    ],
    ids=["wrapper", "reentrant_wrapper", "by_hand"],
)


def gradients(model, ids, **kwargs):
    """By each parameter, in order, and what the model returned."""
    output = model.train()(ids, labels=ids, **kwargs)
    output.loss.backward()
    return [parameter.grad for parameter in model.parameters()], output


def model_of(patched=True, attention="sdpa"):
    model = tiny_llama(attn_implementation=attention)
    if patched:
        patch_llama(model, rescale_every=7)
    return model


@ways
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_are_those_without(checkpointed, attention):
    expected, _ = gradients(model_of(attention=attention), LONG, use_cache=False)
    model = model_of(attention=attention)
    checkpointed(model)
    actual, output = gradients(model, LONG)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)
    assert output[CACHE].get_seq_length() == LONG.shape[1]


@ways
def test_gradients_within_the_window_are_those_of_stock(checkpointed):
    ids = LONG[:, :WINDOW]
    expected, _ = gradients(model_of(patched=False), ids, use_cache=False)
    model = model_of()
    checkpointed(model)
    for one, other in zip(gradients(model, ids)[0], expected, strict=True):
        assert_close(one, other)


def test_the_cache_can_be_continued():
    model = model_of()
    by_hand(model)
    cache = DynamicYaRNCache()
    gradients(model, LONG[:, :50], **{CACHE: cache})
    expected = logits_of(model, LONG)
    assert_close(logits_of(model, LONG[:, 50:], cache), expected[:, 50:])


def test_frozen_attention_reads_no_keys_of_another_text():
    """Its rotated keys go by the cache, which may hold other tokens when the layer runs again."""
    ids, grads = LONG[:, :WINDOW], []  # of one scale, so that rotated keys stay
    for wrapped in (True, False):
        model = model_of().requires_grad_(False)
        model.model.layers[0].mlp.requires_grad_(True)
        if wrapped:
            by_hand(model)
        cache = DynamicYaRNCache()
        loss = model.train()(ids, labels=ids, **{CACHE: cache}).loss
        cache.reset()
        with torch.no_grad():
            model(ids.flip(1), **{CACHE: cache})
        loss.backward()
        grads.append(model.model.layers[0].mlp.up_proj.weight.grad)
    assert_close(*grads)


@ways
def test_over_a_filled_cache_is_refused(checkpointed):
    model = model_of()
    cache = DynamicYaRNCache()
    logits_of(model, LONG[:, :40], cache)
    checkpointed(model)
    with pytest.raises(ValueError, match=r"runs again in a backward pass.*got one with 40"):
        gradients(model, LONG[:, 40:], **{CACHE: cache})
