"""Half precision, autocast, and gradients."""

import pytest
import torch
from conftest import CACHE, assert_close, logits_of, random_ids, tiny_llama

from hf_dynyarn import DynamicYaRNCache, patch_llama
from hf_dynyarn.versions import TRANSFORMERS

IDS = random_ids(90, rows=4)


def error(logits, exact):
    return (logits.double() - exact).square().mean().sqrt().item()


def chunked(model, size):
    cache = DynamicYaRNCache()
    return torch.cat([logits_of(model, chunk, cache) for chunk in IDS.split(size, 1)], 1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_no_worse_than_stock(attention, dtype):
    """Error against the same weights in float64; stock's own, at s = 1, is the measure."""
    model = tiny_llama(attn_implementation=attention).to(dtype)
    exact = tiny_llama(attn_implementation=attention).to(dtype).double()
    stock = error(logits_of(model, IDS), logits_of(exact, IDS))
    for twin in (model, exact):
        patch_llama(twin, rescale_every=7)
    expected = logits_of(exact, IDS)
    for logits in (logits_of(model, IDS), chunked(model, 1), chunked(model, 20)):
        assert logits.dtype == dtype
        assert error(logits, expected) <= 1.5 * stock


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_autocast_is_no_worse_than_stock(attention):
    model, exact = tiny_llama(attn_implementation=attention), tiny_llama().double()
    with torch.autocast("cpu", torch.bfloat16):
        stock_logits = logits_of(model, IDS)
    stock = error(stock_logits, logits_of(exact, IDS))
    for twin in (model, exact):
        patch_llama(twin, rescale_every=7)
    expected = logits_of(exact, IDS)
    with torch.autocast("cpu", torch.bfloat16):
        cache = DynamicYaRNCache()
        logits_of(model, IDS, cache)
        results = [logits_of(model, IDS), chunked(model, 1)]
    assert cache.layers[0].keys.dtype == torch.bfloat16, "the keys are those of k_proj"
    for logits in results:
        assert error(logits, expected) <= 1.5 * stock


def enable_checkpointing(model, kwargs=None):
    """Renamed in transformers 5.24."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")(kwargs)


class TestGradients:
    def model(self, **changes):
        model = tiny_llama(num_hidden_layers=2, **changes).double().train()
        patch_llama(model, rescale_every=7)
        return model

    def loss(self, model, **kwargs):
        # In float64, as transformers' own loss is not.
        return model(IDS[:2], **kwargs).logits[..., :10].sum()

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_are_those_of_finite_differences(self, attention):
        model = self.model(attn_implementation=attention)
        self.loss(model).backward()
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(model.model.layers[0].self_attn, name).weight
            generator = torch.Generator().manual_seed(0)
            step = torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 3e-4
            with torch.no_grad():
                weight += step
                above = self.loss(model)
                weight -= 2 * step
                below = self.loss(model)
                weight += step
            expected = (weight.grad * step).sum().item()
            assert ((above - below) / 2).item() == pytest.approx(expected, rel=1e-3)

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("use_cache", [True, False])
    def test_checkpointing_changes_nothing(self, reentrant, use_cache):
        plain, checkpointed = self.model(), self.model()
        enable_checkpointing(checkpointed, {"use_reentrant": reentrant})
        checkpointed.enable_input_require_grads()
        self.loss(plain, use_cache=False).backward()
        self.loss(checkpointed, use_cache=use_cache).backward()
        for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
            assert_close(other.grad, one.grad, 1e-12)

    def test_a_filled_cache_is_refused_under_checkpointing(self):
        model = self.model()
        enable_checkpointing(model)
        cache = DynamicYaRNCache()
        logits_of(model.eval(), IDS, cache)
        model.train()
        with pytest.raises(ValueError, match=r"checkpoints gradients.*90 tokens"):
            model(IDS[:, :3], **{CACHE: cache})
        assert cache.get_seq_length() == 90

    def test_checkpointing_without_gradients(self):
        """Before transformers 5.24 the layers drop the cache even there."""
        model = self.model()
        expected = logits_of(model, IDS)
        enable_checkpointing(model)
        assert_close(logits_of(model, IDS), expected)
        cache = DynamicYaRNCache()
        if TRANSFORMERS < (5, 24):
            with pytest.raises(ValueError, match=r"Call model.eval\(\)"):
                logits_of(model, IDS[:, :50], cache)
            model.eval()
        logits_of(model, IDS[:, :50], cache)
        assert_close(logits_of(model, IDS[:, 50:], cache), expected[:, 50:])

    @pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
    @pytest.mark.parametrize("rotated_copy", [True, False])
    def test_flow_through_a_cache(self, trained, rotated_copy):
        """Whatever needs a gradient, as with an adapter on one of the three."""
        model = self.model()
        for name, weight in model.named_parameters():
            weight.requires_grad_("layers.0" in name and trained in name)
        whole = model(IDS, use_cache=False).logits[:, 50:].square().sum()
        whole.backward()
        weight = getattr(model.model.layers[0].self_attn, trained).weight
        expected = weight.grad.clone()
        model.zero_grad()
        cache = DynamicYaRNCache(rotated_copy=rotated_copy)
        model(IDS[:, :50], **{CACHE: cache})
        model(IDS[:, 50:], **{CACHE: cache}).logits.square().sum().backward()
        assert_close(weight.grad / expected.abs().max(), expected / expected.abs().max(), 1e-10)

    def test_a_step_of_training_on_packed_rows(self):
        """The loss of packed documents is the loss of each by itself."""
        model = self.model()
        documents = IDS[:1].split([40, 50], 1)
        positions = torch.cat((torch.arange(40), torch.arange(50)))[None]
        packed = model(IDS[:1], position_ids=positions, use_cache=False).logits
        packed.square().sum().backward()
        together = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
        model.zero_grad()
        for document in documents:
            model(document, use_cache=False).logits.square().sum().backward()
        apart = model.model.layers[0].self_attn.k_proj.weight.grad
        assert_close(together / apart.abs().max(), apart / apart.abs().max(), 1e-10)
