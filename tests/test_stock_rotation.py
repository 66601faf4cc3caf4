"""The rotation of a patched model at scale 1 is that of its stock module, or it is refused."""

import copy

import pytest
import torch
from conftest import WINDOW, assert_close, logits_of, random_ids, tiny_config, tiny_llama
from families import BACKENDS, CASES, MORE, PARTIAL, STEP, tiny
from oracle import llama_logits
from transformers import LlamaForCausalLM

from hf_dynyarn import patch_llama
from hf_dynyarn.versions import TRANSFORMERS

IGNORED = ("arcee", "cohere", "gemma", "llama", "mistral", "qwen2", "qwen3", "starcoder2")
READ = ("glm", "glm4", "minimax_m2", "phi", "phi3")
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": WINDOW}
TUNED = {**YARN, "beta_fast": 16.0, "attention_factor": 1.1, "truncate": False}
DEEPSEEK = {**YARN, "mscale": 1.2, "mscale_all_dim": 0.6}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
    "long_factor": [1.0, 1.2, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0],
    "original_max_position_embeddings": WINDOW,
}
OURS = {"rope_type": "dynamic_yarn", "original_max_position_embeddings": WINDOW}
ROPES = {
    "linear": LINEAR,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-tuned": TUNED,
    "deepseek": DEEPSEEK,
    "dynamic": DYNAMIC,
    "longrope": LONGROPE,
    "dynamic_yarn": OURS,
}

with_ropes = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)


def model_of(rope, **changes):
    if rope["rope_type"] in ("yarn", "longrope"):
        changes["max_position_embeddings"] = 4 * WINDOW
    if rope["rope_type"] == "longrope":  # where transformers 4 reads it
        changes["original_max_position_embeddings"] = WINDOW
    return tiny_llama(rope_scaling=dict(rope), **changes)


def partial(monkeypatch, model_type):
    monkeypatch.setitem(
        MORE,
        f"{model_type}-half a head",
        ({**CASES[model_type][0], **PARTIAL}, CASES[model_type][1]),
    )
    return tiny(f"{model_type}-half a head", BACKENDS.get(model_type, ["sdpa"])[0])


class TestPartOfAHead:
    """`partial_rotary_factor`, which the code of most families ignores from transformers 5 on."""

    @pytest.mark.parametrize("model_type", [*IGNORED, *READ])
    def test_stock_is_followed(self, monkeypatch, model_type):
        model, ids = partial(monkeypatch, model_type), random_ids(20)
        if TRANSFORMERS < (5, 0) and model_type in IGNORED:
            with pytest.raises(ValueError, match=r"rotate all 16 dimensions of a head, got 8"):
                patch_llama(model)
            with pytest.raises(RuntimeError, match="must match"):
                model(ids)
            return
        stock = logits_of(model, ids)
        patch_llama(model)
        assert_close(logits_of(model, ids), stock)

    @pytest.mark.skipif(TRANSFORMERS < (5, 0), reason="refused on this transformers")
    def test_is_the_oracle_past_the_window(self):
        model, ids = tiny_llama(**PARTIAL).double(), random_ids(50)
        patch_llama(model, rescale_every=STEP)
        assert_close(logits_of(model, ids)[0], llama_logits(model, ids[0], WINDOW, STEP), 1e-5)

    def test_part_of_a_head_that_stock_cannot_rotate_is_refused(self):
        """Scaled types read the key everywhere; the attention of the family does not follow."""
        model = tiny_llama(rope_scaling=dict(LINEAR), **PARTIAL)
        with pytest.raises(RuntimeError, match="must match"):
            model(random_ids(8))
        with pytest.raises(ValueError, match=r"rotate all 16 dimensions of a head, got 8.*partial"):
            patch_llama(model)
        assert "Unrotated" not in str(model)


def frequencies_in(model):
    """Buffers, and on transformers 4 plain attributes."""
    modules = [m for m in model.modules() if "RotaryEmbedding" in type(m).__name__]
    names = [(m, n) for m in modules for n in {**vars(m), **m._buffers} if n.endswith("inv_freq")]
    return [(module, name, getattr(module, name)) for module, name in names]


class TestOtherFrequencies:
    @pytest.mark.parametrize("case", CASES)
    def test_of_the_module(self, case):
        model = tiny(case)
        for module, name, frequencies in frequencies_in(model):
            setattr(module, name, 0.9 * frequencies)
        with pytest.raises(
            ValueError, match=r"frequencies of the stock module.*got .* leave it unp"
        ):
            patch_llama(model)
        assert "Unrotated" not in str(model)

    @with_ropes
    def test_of_the_module_for_each_type(self, rope):
        model = model_of(rope)
        for module, name, frequencies in frequencies_in(model):
            setattr(module, name, torch.cat((frequencies[:-1], 1.01 * frequencies[-1:])))
        with pytest.raises(ValueError, match=r"frequencies of the stock module.* pair 7"):
            patch_llama(model)

    @pytest.mark.parametrize("case", ["gemma3_text", "olmo3"])
    @pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
    def test_of_one_type_of_layers(self, case, layer_type):
        model = tiny(case)
        local = layer_type == "sliding_attention"
        holder, prefix = model.model.rotary_emb if hasattr(model.model, "rotary_emb") else None, ""
        if hasattr(model.model, "rotary_embs"):  # OLMo 3 on transformers 4
            holder = model.model.rotary_embs[layer_type]
        elif hasattr(model.model, "rotary_emb_local"):  # Gemma 3 on transformers 4
            holder = model.model.rotary_emb_local if local else holder
        else:
            prefix = f"{layer_type}_"
        for name in ("inv_freq", "original_inv_freq"):
            setattr(holder, prefix + name, 0.9 * getattr(holder, prefix + name))
        with pytest.raises(ValueError, match=rf"stock module of {layer_type} layers"):
            patch_llama(model)

    @with_ropes
    def test_another_gain(self, rope):
        model = model_of(rope)
        model.model.rotary_emb.attention_scaling *= 1.1
        with pytest.raises(ValueError, match=r"gain of the stock module.*got"):
            patch_llama(model)

    def test_a_config_edited_after_the_model_was_made(self):
        """Stock goes on as it was made."""
        model = tiny_llama()
        if TRANSFORMERS >= (5, 0):
            model.config.rope_parameters["rope_theta"] = 2e4
        else:
            model.config.rope_theta = 2e4
        with pytest.raises(
            ValueError, match=r"frequencies of the stock module.*Make the model anew"
        ):
            patch_llama(model)


class TestTheSameFrequencies:
    @with_ropes
    @pytest.mark.parametrize("options", [{}, {"original_max_position_embeddings": 20}], ids=str)
    def test_every_type_with_and_without_a_window_of_the_users(self, rope, options):
        patch_llama(model_of(rope), **options)

    def test_options_of_the_users(self):
        patch_llama(model_of(YARN), beta_fast=8.0, attention_factor=1.3, truncate=False)
        patch_llama(model_of(YARN), finetuned=True)

    @with_ropes
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
    def test_in_another_dtype_and_back(self, rope, dtype):
        model = model_of(rope).to(dtype)
        patch_llama(model).remove()
        patch_llama(model.float())

    @pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
    def test_after_a_long_call_of_the_stock_model(self, rope):
        """Whose module then holds other frequencies for the time being."""
        model, twin, ids = model_of(rope), model_of(rope), random_ids(WINDOW)
        logits_of(model, random_ids(4 * WINDOW + 8))
        patch_llama(twin)
        patch_llama(model)
        assert torch.equal(logits_of(model, ids), logits_of(twin, ids))

    @pytest.mark.parametrize("case", CASES)
    def test_patched_twice(self, case):
        model = tiny(case)
        patch_llama(model)
        patch_llama(model, max_scale=8.0)

    @with_ropes
    def test_on_no_device(self, rope):
        """Nothing to compare: then with what the module would hold."""
        twin = model_of(rope)
        with torch.device("meta"):
            model = LlamaForCausalLM(copy.deepcopy(twin.config))
        assert model.model.rotary_emb.inv_freq.is_meta
        patch_llama(model)
        model.to_empty(device="cpu")
        model.load_state_dict(twin.state_dict())
        patch_llama(twin)
        ids = random_ids(WINDOW + 8)
        assert torch.equal(logits_of(model.eval(), ids), logits_of(twin, ids))

    def test_on_no_device_with_a_key_that_the_code_ignores(self):
        with torch.device("meta"):
            model = LlamaForCausalLM(tiny_config(**PARTIAL))
        if TRANSFORMERS < (5, 0):
            with pytest.raises(ValueError, match="rotate all 16 dimensions of a head, got 8"):
                patch_llama(model)
            return
        patch_llama(model)
        twin = tiny_llama(**PARTIAL)
        stock = logits_of(twin, ids := random_ids(20))
        model.to_empty(device="cpu")
        model.load_state_dict(twin.state_dict())
        assert_close(logits_of(model.eval(), ids), stock)

    @pytest.mark.parametrize("case", ["gemma3_text", "gemma3_text-linear", "olmo3"])
    def test_on_no_device_by_layer_type(self, case):
        twin = tiny(case)
        with torch.device("meta"):
            model = type(twin)(copy.deepcopy(twin.config))
        patch_llama(model)


class TestStaticYarn:
    """The exception to "up to the window the model is the stock model"."""

    def test_is_the_model_before_yarn(self):
        model, ids = model_of(YARN), random_ids(WINDOW)
        stock, plain = logits_of(model, ids), logits_of(tiny_llama(), ids)
        assert (stock - plain).abs().max() > 0.1
        patch_llama(model)
        assert_close(logits_of(model, ids), plain)

    @pytest.mark.parametrize("rope", [YARN, TUNED, DEEPSEEK], ids=["yarn", "tuned", "deepseek"])
    def test_is_the_stock_model_up_to_its_factor_where_it_was_trained_so(self, rope):
        model, ids = model_of(rope), random_ids(4 * WINDOW)
        stock = logits_of(model, ids)
        patch_llama(model, finetuned=True)
        assert_close(logits_of(model, ids), stock)
