"""A patched decoder when it is called: what reaches it, and which backend it takes."""

import pytest
import torch
from conftest import assert_close, left_padded, logits_of, random_ids, tiny_llama, traces
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_dynyarn import DynamicYaRNCache, patch_llama, unpatch_llama

LONG = random_ids(70)


class TestOneDecoder:
    def test_positional_arguments_reach_the_plan(self, model):
        ids, mask = left_padded([random_ids(20)[0], random_ids(50)[0]])
        patch_llama(model)
        by_name = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert torch.equal(model.model(ids, mask).last_hidden_state, by_name)

    def test_eager_attention_of_a_subclass(self):
        model = tiny_llama(attn_implementation="eager")

        class Subclass(LlamaAttention):
            pass

        Subclass.__module__ = __name__
        patch_llama(model)
        expected = logits_of(model, LONG)
        for layer in model.model.layers:
            layer.self_attn.__class__ = Subclass
        assert torch.equal(logits_of(model, LONG), expected)


class TestAttentionImplementation:
    def test_setting_it_keeps_the_model_patched(self, model):
        patch_llama(model, rescale_every=7)
        expected = logits_of(model, LONG)
        for name in ("eager", "sdpa", "eager"):
            model.set_attn_implementation(name)
            assert model.config._attn_implementation == name
            assert_close(logits_of(model, LONG), expected)
        unpatch_llama(model)
        assert model.config._attn_implementation == "eager"
        assert torch.equal(
            logits_of(model, LONG), logits_of(tiny_llama(attn_implementation="eager"), LONG)
        )

    @pytest.mark.parametrize("name", ["eager", "sdpa"])
    def test_reads_as_before(self, name):
        model = tiny_llama(attn_implementation=name)
        handle = patch_llama(model)
        assert model.config._attn_implementation == name
        handle.remove()
        assert {
            module.config._attn_implementation
            for module in model.modules()
            if hasattr(module, "config")
        } == {name}

    def test_the_backend_that_is_named_is_the_one_that_runs(self, model, monkeypatch):
        """Otherwise the tests of one backend could pass on another."""
        patch_llama(model)
        calls = []
        stock = nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(
            nn.functional,
            "scaled_dot_product_attention",
            lambda *a, **k: calls.append(1) or stock(*a, **k),
        )
        logits_of(model, LONG)
        assert calls
        calls.clear()
        model.set_attn_implementation("eager")
        logits_of(model, LONG)
        assert not calls

    def test_flex_attention_is_refused_by_name(self, model):
        patch_llama(model)
        model.config._attn_implementation = "flex_attention"
        with pytest.raises(
            ValueError, match=r"eager, sdpa or a flash attention, got 'flex_attention'"
        ):
            logits_of(model, LONG)
        other = tiny_llama()
        other.config._attn_implementation = "flex_attention"
        before = traces(other)
        with pytest.raises(ValueError, match=r"set_attn_implementation\(.sdpa.\)"):
            patch_llama(other)
        assert traces(other) == before


class TestRefusedCalls:
    def test_a_layer_by_itself(self, model):
        patch_llama(model)
        hidden = torch.zeros(1, 3, 64)
        positions = torch.arange(3)[None]
        with pytest.raises(ValueError, match="must be called by its patched decoder"):
            model.model.layers[0](
                hidden,
                position_ids=positions,
                position_embeddings=model.model.rotary_emb(hidden, positions),
            )

    def test_forward_instead_of_call(self, model):
        patch_llama(model)
        with pytest.raises(ValueError, match=r"Call the model, not its layers or its forward\(\)"):
            model.model.forward(LONG)

    def test_both_ids_and_embeddings(self, model):
        patch_llama(model)
        with pytest.raises(ValueError, match="input_ids"):
            model(LONG, inputs_embeds=torch.zeros(1, 70, 64))
        with pytest.raises(ValueError, match="input_ids"):
            model()

    def test_no_tokens(self, model):
        patch_llama(model)
        with pytest.raises(ValueError, match="at least one token"):
            model(LONG[:, :0])

    def test_layers_cropped_behind_the_back_of_the_cache(self, model):
        patch_llama(model)
        cache = DynamicYaRNCache()
        logits_of(model, LONG, cache)
        cache.layers[1].keys = cache.layers[1].keys[:, :, :-3]
        with pytest.raises(
            ValueError, match=r"layer 1 of the cache must hold 70 tokens.*got 67.*cache.crop"
        ):
            logits_of(model, LONG, cache)
