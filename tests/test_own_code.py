"""Models that attend in another way than their family does: refused by name, before any change."""

import copy
import functools

import pytest
import torch
from conftest import WINDOW, assert_close, logits_of, random_ids, tiny_llama
from families import CASES, tiny
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
)

from hf_dynyarn import DynamicYaRNCache, patch_llama

LONG = random_ids(WINDOW + 12)


class Bidirectional(LlamaModel):
    """As embedding models make themselves."""

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
        count = input_ids.shape[1]
        mask = torch.zeros(1, 1, count, count)
        return super().forward(input_ids, attention_mask=mask, use_cache=False)


class WithoutCache(LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids, **kwargs)


class OwnAttention(LlamaAttention):
    """As remote code has it: rotates by what it gets, and attends by itself."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return self.o_proj(output.transpose(1, 2).flatten(2)), None


def own_method(module, *args, **kwargs):
    return type(module).forward(module, *args, **kwargs)


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


class TestBidirectional:
    @pytest.mark.parametrize("which", [slice(None), slice(1, 2)], ids=["all layers", "one"])
    def test_layers_that_say_so(self, model, which):
        patched = tiny_llama()
        patch_llama(patched)
        for one in (model, patched):
            for attention in attentions(one)[which]:
                attention.is_causal = False
        with pytest.raises(ValueError, match=r"must attend causally, got is_causal=False in layer"):
            patch_llama(model)
        assert "Unrotated" not in str(model)
        with pytest.raises(ValueError, match="must attend causally, got is_causal=False in layer"):
            patched(LONG)

    def test_a_decoder_that_makes_its_own_mask(self, model):
        model.model.__class__ = Bidirectional
        with pytest.raises(TypeError, match=r"forward\(\) of LlamaModel.*Bidirectional.*unpatched"):
            patch_llama(model)
        assert "Unrotated" not in str(model)

    def test_a_decoder_that_takes_no_cache(self, model):
        model.model.__class__ = WithoutCache
        with pytest.raises(TypeError, match=r"forward\(\) of LlamaModel.*got .*WithoutCache"):
            patch_llama(model)

    @pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, WINDOW + 12, WINDOW + 12)])
    def test_a_layer_that_makes_its_own_mask(self, model, mask):
        """Seen when it is called: a layer may do other things of its own."""

        class Layer(LlamaDecoderLayer):
            def forward(self, hidden_states, attention_mask=None, **kwargs):
                return super().forward(hidden_states, attention_mask=mask, **kwargs)

        patch_llama(model)
        expected = logits_of(model, LONG)
        model.model.layers[1].__class__ = Layer
        cache = DynamicYaRNCache()
        with pytest.raises(ValueError, match=r"layer 1 must .* the mask that the model was called"):
            logits_of(model, LONG, cache)
        model.model.layers[1].__class__ = LlamaDecoderLayer
        assert_close(logits_of(model, LONG, cache), expected)


class TestOwnAttention:
    def test_in_each_layer(self, model):
        for attention in attentions(model):
            attention.__class__ = OwnAttention
        with pytest.raises(
            TypeError, match=r"forward\(\) of LlamaAttention.*OwnAttention.*unpatch"
        ):
            patch_llama(model)
        assert "Unrotated" not in str(model)

    def test_in_one_layer_after_patching(self, model):
        patch_llama(model)
        attentions(model)[2].__class__ = OwnAttention
        with pytest.raises(TypeError, match=r"forward\(\) of LlamaAttention.*OwnAttention"):
            model(LONG)

    def test_put_on_the_class(self, model, monkeypatch):
        """As Unsloth does it."""
        monkeypatch.setattr(LlamaAttention, "forward", OwnAttention.forward)
        with pytest.raises(TypeError, match=r"forward\(\) of LlamaAttention.*OwnAttention.forward"):
            patch_llama(model)

    def test_put_on_the_module(self, model):
        """As StreamingLLM does it."""
        attention = attentions(model)[0]
        attention.forward = own_method.__get__(attention)
        with pytest.raises(TypeError, match=r"forward\(\) of LlamaAttention.*own_method"):
            patch_llama(model)

    def test_of_every_family(self, monkeypatch):
        for case in CASES:
            if "-" in case:
                continue
            try:
                model = tiny(case)
            except pytest.skip.Exception:
                continue
            family = type(attentions(model)[0])
            attentions(model)[0].__class__ = type(
                "Own", (family,), {"forward": lambda self, *args, **kwargs: None}
            )
            with pytest.raises(TypeError, match=rf"forward\(\) of {family.__name__}"):
                patch_llama(model)

    def test_around_it(self, model):
        """As an adaption prompt of peft, which rotates queries of its own."""

        class Adapted(torch.nn.Module):
            def __init__(self, model):
                super().__init__()
                self.model = model

            def forward(self, **kwargs):
                return self.model(**kwargs)

        layer = model.model.layers[1]
        layer.self_attn = Adapted(layer.self_attn)
        with pytest.raises(
            TypeError, match=r"attention layer.* in its decoder layer.*got .*Adapted"
        ):
            patch_llama(model)

    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
    def test_a_real_adaption_prompt(self, model):
        peft = pytest.importorskip("peft")
        config = peft.AdaptionPromptConfig(
            adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM", target_modules="self_attn"
        )
        with pytest.raises(TypeError, match=r"in its decoder layer.*got .*AdaptedAttention"):
            patch_llama(peft.get_peft_model(model, config))


class TestWhatIsFine:
    """Anything that leaves the code of the family in charge."""

    @pytest.fixture
    def expected(self):
        model = tiny_llama()
        patch_llama(model)
        return logits_of(model, LONG)

    def test_subclasses_without_a_forward_of_their_own(self, model, expected):
        model.model.__class__ = type("Decoder", (LlamaModel,), {})
        for attention in attentions(model):
            attention.__class__ = type("Attention", (LlamaAttention,), {})
        patch_llama(model)
        assert torch.equal(logits_of(model, LONG), expected)

    def test_a_layer_with_a_forward_of_its_own(self, model):
        class Halved(LlamaDecoderLayer):
            def forward(self, hidden_states, *args, **kwargs):
                return super().forward(0.5 * hidden_states, *args, **kwargs)

        for layer in model.model.layers:
            layer.__class__ = Halved
        stock = logits_of(model, LONG[:, :WINDOW])
        patch_llama(model)
        assert_close(logits_of(model, LONG[:, :WINDOW]), stock)

    @pytest.mark.parametrize("wraps", [functools.wraps, lambda stock: lambda function: function])
    def test_wrappers_on_instances(self, model, expected, wraps):
        """As accelerate's hooks, profilers and the like."""

        def wrapped(stock):
            return wraps(stock)(lambda *args, **kwargs: stock(*args, **kwargs))

        for module in (model.model, *attentions(model)):
            module.forward = wrapped(module.forward)
        patch_llama(model)
        assert torch.equal(logits_of(model, LONG), expected)

    def test_wrappers_of_torch(self, model, expected):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for layer in model.model.layers:
            layer.self_attn = checkpoint_wrapper(layer.self_attn)
        model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
        patch_llama(model)
        assert_close(logits_of(model, LONG, use_cache=False), expected)

    def test_compiled_layers(self, model, expected):
        for layer in model.model.layers:
            layer.self_attn = torch.compile(layer.self_attn, backend="eager")
        patch_llama(model)
        assert_close(logits_of(model, LONG), expected)

    def test_deep_copies(self, model, expected):
        patch_llama(model)
        assert torch.equal(logits_of(copy.deepcopy(model), LONG), expected)
