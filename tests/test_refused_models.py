"""Models that are refused by name when they are patched."""

from types import SimpleNamespace

import pytest
import torch
from conftest import logits_of, random_ids, tiny_llama, traces
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from hf_dynyarn import DynamicYaRNCache, DynamicYaRNConfig, patch_llama, versions
from hf_dynyarn.resolve import resolve_schedule

LONG = random_ids(70)


class TestRefusedModels:
    def test_rope_types(self, model):
        rope = getattr(model.config, "rope_parameters", None) or {}
        name = "rope_parameters" if rope else "rope_scaling"
        setattr(model.config, name, {**rope, "rope_type": "proportional"})
        before = traces(model)
        with pytest.raises(ValueError, match=r"one of \('default', .*\), got 'proportional'"):
            patch_llama(model)
        assert traces(model) == before

    @pytest.mark.parametrize(
        ("model_type", "why"),
        [
            ("deepseek_v3", "half of a key is rotated, for all heads at once"),
            ("gemma2", "caps its attention logits"),
            ("ernie4_5", "rotates by tables of another shape"),
            ("hunyuan_v1_dense", "keys are normed behind the rotation"),
            ("stablelm", "keywords do not reach the attention"),
        ],
    )
    def test_other_families(self, model_type, why):
        config = CONFIG_MAPPING[model_type](
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=97,
            pad_token_id=0,
        )
        model = AutoModelForCausalLM.from_config(config)
        before = traces(model)
        with pytest.raises(TypeError, match=rf"'llama'.*got .* of model_type '{model_type}'"):
            patch_llama(model)
        assert traces(model) == before
        with patch_llama(), pytest.raises(TypeError, match="must be used with a patched model"):
            logits_of(model, LONG, DynamicYaRNCache())

    def test_a_decoder_that_keeps_keywords_to_itself(self, model):
        """As Qwen2-MoE's on transformers 4: the plan would not reach the layers."""

        class Old(type(model.model)):
            def forward(self, input_ids=None, cache=None, past_key_values=None):
                raise NotImplementedError

        model.model.__class__ = Old
        before = traces(model)
        with pytest.raises(TypeError, match=r"Old must hand keywords on.*Upgrade transformers"):
            patch_llama(model)
        assert traces(model) == before

    def test_not_a_model(self):
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got str"):
            patch_llama("llama")
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got DynamicYaRNConfig"):
            patch_llama(DynamicYaRNConfig())

    def test_two_models_in_one(self, model):
        with pytest.raises(ValueError, match="one decoder, got 2"):
            patch_llama(nn.ModuleList([model, tiny_llama()]))

    def test_a_model_that_is_not_causal(self, model):
        patched = tiny_llama()
        patch_llama(patched)
        for one in (model, patched):
            one.config.is_causal = False
        with pytest.raises(ValueError, match="must attend causally"):
            patch_llama(model)
        with pytest.raises(ValueError, match="must attend causally"):
            patched(LONG)

    def test_attention_that_is_not_llamas_own(self, model):
        model.model.layers[1].self_attn = nn.Identity()
        with pytest.raises(TypeError, match="one attention layer of its own in each decoder layer"):
            patch_llama(model)

    def test_a_family_that_only_inherits(self, model):
        """Class-wide, it is left alone."""
        model.config.model_type = "fancy"
        stock = logits_of(model, LONG)
        with pytest.raises(TypeError, match="of model_type 'fancy'"):
            patch_llama(model)
        with patch_llama():
            assert torch.equal(logits_of(model, LONG), stock)

    def test_a_config_written_by_a_newer_transformers(self, monkeypatch):
        """On transformers 4, which reads rope_theta alone and would take its default."""
        monkeypatch.setattr(versions, "TRANSFORMERS", (4, 57))
        config = SimpleNamespace(
            model_type="llama",
            rope_theta=1e4,
            rope_scaling=None,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
            num_attention_heads=2,
        )
        with pytest.raises(ValueError, match=r"rope_parameters=.*Upgrade to transformers 5"):
            resolve_schedule(config, DynamicYaRNConfig())
