"""`output_attentions`: the weights that are returned are those that the output came from."""

import pytest
import torch
from conftest import WINDOW, assert_close, random_ids, tiny_llama
from families import tiny

from hf_dynyarn import patch_llama

LONG = 70


def gradients(model, ids, **kwargs):
    """Of the loss by the weights of each layer, `(B, Hq, T, L)`, and by the embeddings."""
    model.train()
    output = model(ids, labels=ids, output_attentions=True, **kwargs)
    for weights in output.attentions:
        weights.retain_grad()
    output.loss.backward()
    assert all(weights.grad is not None for weights in output.attentions)
    return output, [weights.grad for weights in output.attentions]


def test_gradients_within_the_window_are_those_of_stock():
    ids = random_ids(WINDOW - 1, rows=2)
    stock, patched = (
        tiny_llama(attn_implementation="eager"),
        tiny_llama(attn_implementation="eager"),
    )
    patch_llama(patched)
    _, expected = gradients(stock, ids)
    _, actual = gradients(patched, ids)
    assert_close(torch.stack(actual), torch.stack(expected))


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no_cache"])
def test_gradients_over_many_scales(use_cache):
    model = tiny_llama(attn_implementation="eager").double()
    patch_llama(model, rescale_every=7)
    ids = random_ids(LONG)
    output, grads = gradients(model, ids, use_cache=use_cache)
    assert [weights.shape for weights in output.attentions] == [(1, 4, LONG, LONG)] * 3
    weights = output.attentions[-1]
    assert grads[-1][:, :, :-1].abs().amax(-1).gt(0).all()  # the last query is in no loss
    assert_close(weights.sum(-1), torch.ones(1, 4, LONG).double())


def test_results_are_those_without_attentions():
    ids = random_ids(LONG)
    model = tiny_llama(attn_implementation="eager").train()
    patch_llama(model, rescale_every=7)
    with_weights = model(ids, output_attentions=True)
    assert_close(with_weights.logits.detach(), model(ids).logits.detach())


def test_the_whole_gradient_is_right():
    """That of the embeddings, with the weights asked for and without."""
    ids = random_ids(LONG)
    grads = []
    for wanted in (True, False):
        model = tiny_llama(attn_implementation="eager").double().train()
        patch_llama(model, rescale_every=7)
        model(ids, labels=ids, output_attentions=wanted).loss.backward()
        grads.append(model.model.embed_tokens.weight.grad)
    assert_close(*grads, 1e-9)


def test_sinks_of_gpt_oss():
    """Whose weights do not add up to one."""
    model = tiny("gpt_oss", attn_implementation="eager")
    patch_llama(model, rescale_every=7)
    output, _ = gradients(model, random_ids(LONG))
    expected = model(random_ids(LONG)).logits
    assert_close(output.logits.detach(), expected.detach())
