"""Every family: stock up to the window, and beyond it the oracle, with a cache and without."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROUNDING,
    VOCABULARY,
    WINDOW,
    assert_close,
    generate,
    left_padded,
    logits_of,
    random_ids,
)
from families import BACKENDS, CASES, INTERLEAVED, STEP, tiny, turn_of
from oracle import stepwise_logits
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from hf_dynyarn import DynamicYaRNCache, DynamicYaRNConfig, patch_llama, versions
from hf_dynyarn.backends import sdpa
from hf_dynyarn.models import FAMILIES
from hf_dynyarn.resolve import resolve_schedule

LENGTH = 50  # past the window, over several stairs


@pytest.fixture(params=CASES)
def case(request):
    return request.param


with_backends = pytest.mark.parametrize(
    ("case", "backend"),
    [(case, backend) for case in CASES for backend in BACKENDS.get(case, ["sdpa", "eager"])],
)


def test_every_family_is_here():
    assert {case.split("-")[0] for case in CASES} == set(FAMILIES)


@with_backends
def test_is_stock_up_to_the_window(case, backend):
    model = tiny(case, backend)
    ids = random_ids(WINDOW, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    stock = logits_of(model, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0))
    patch_llama(model)
    ours = logits_of(model, ids, attention_mask=mask)
    assert_close(ours[mask.bool()], stock[mask.bool()])


@with_backends
def test_is_the_oracle_past_the_window(case, backend):
    model = tiny(case, backend).double()
    ids = random_ids(LENGTH)
    expected = stepwise_logits(model, ids[0], turn_of(case, model), case in INTERLEAVED)
    patch_llama(model, rescale_every=STEP)
    assert_close(logits_of(model, ids)[0], expected, 1e-5)


@pytest.mark.parametrize("rotated_copy", [True, False])
def test_is_the_same_cached(case, rotated_copy):
    model = tiny(case)
    patch_llama(model, rescale_every=STEP)
    ids = random_ids(LENGTH)
    whole = logits_of(model, ids)
    cache = DynamicYaRNCache(rotated_copy=rotated_copy)
    parts = [logits_of(model, part, cache) for part in ids.split([29, 9, 1, 1, 6, 1, 1, 1, 1], 1)]
    assert_close(torch.cat(parts, dim=1), whole, 3 * ROUNDING)


def test_generates_alike_in_a_batch_and_alone(case):
    """Padding, and a DynamicCache that generate() makes for the family."""
    model = tiny(case)
    patch_llama(model, rescale_every=STEP)
    rows = [random_ids(length, seed=length)[0] for length in (9, 30)]
    ids, mask = left_padded(rows)
    batch = generate(model, ids, attention_mask=mask, new_tokens=20)
    for row, text in zip(rows, batch, strict=True):
        assert torch.equal(generate(model, row[None], new_tokens=20)[0], text)
        uncached = generate(model, row[None], new_tokens=20, use_cache=False)
        assert torch.equal(uncached[0], text)


class TestWindows:
    """Layers whose window lies within the trained one, and those with a larger one."""

    BOTH = pytest.mark.parametrize(
        "case", ["gemma3_text", "ministral", "mistral-window past the trained one"]
    )

    @BOTH
    @pytest.mark.parametrize("backend", ["sdpa", "eager"])
    def test_tiles(self, monkeypatch, case, backend):
        model = tiny(case, backend)
        patch_llama(model, rescale_every=STEP)
        ids = random_ids(90)
        whole = logits_of(model, ids)
        monkeypatch.setattr(sdpa, "TILE", 8)
        assert_close(logits_of(model, ids), whole)
        cache = DynamicYaRNCache()
        parts = [logits_of(model, part, cache) for part in ids.split(37, 1)]
        assert_close(torch.cat(parts, dim=1), whole, 3 * ROUNDING)

    @BOTH
    def test_packed_documents_are_their_solo_runs(self, case):
        model = tiny(case)
        patch_llama(model, rescale_every=STEP)
        texts = [random_ids(length, seed=length) for length in (45, 20, 50)]
        packed = torch.cat([*texts[:2], texts[1], texts[2]], dim=1)
        positions = [torch.arange(len(text[0])) for text in (*texts[:2], texts[1], texts[2])]
        logits = logits_of(model, packed, position_ids=torch.cat(positions)[None])
        solo = [logits_of(model, text) for text in (*texts[:2], texts[1], texts[2])]
        assert_close(logits, torch.cat(solo, dim=1))
        # Rows whose documents start at different columns.
        two = torch.cat((texts[0], texts[1]), dim=1), torch.cat((texts[1], texts[0]), dim=1)
        begins = [[*range(45), *range(20)], [*range(20), *range(45)]]
        logits = logits_of(model, torch.cat(two), position_ids=torch.tensor(begins))
        assert_close(logits[:, -1], torch.stack((solo[1][0, -1], solo[0][0, -1])))

    @BOTH
    def test_rows_are_their_solo_runs(self, case):
        model = tiny(case)
        patch_llama(model, rescale_every=STEP)
        rows = [random_ids(length, seed=length)[0] for length in (20, 60)]
        ids, mask = left_padded(rows)
        cache = DynamicYaRNCache()
        first = logits_of(model, ids[:, :50], cache, attention_mask=mask[:, :50])
        rest = logits_of(model, ids[:, 50:], cache, attention_mask=mask)
        for row, one, shown in zip(rows, torch.cat((first, rest), dim=1), mask, strict=True):
            assert_close(one[shown.bool()], logits_of(model, row[None])[0], 3 * ROUNDING)

    @BOTH
    def test_a_custom_mask_stands_for_all(self, case):
        """As in stock, where a 4-D mask is taken as it is."""
        model, ids = tiny(case), random_ids(WINDOW)
        mask = torch.ones(1, 1, WINDOW, WINDOW, dtype=torch.bool).tril()
        stock = logits_of(model, ids, attention_mask=mask)
        patch_llama(model)
        assert_close(logits_of(model, ids, attention_mask=mask), stock)

    @BOTH
    def test_weights_of_eager(self, case):
        model, ids = tiny(case, "eager"), random_ids(WINDOW)
        stock = model(ids, output_attentions=True).attentions
        patch_llama(model)
        for ours, theirs in zip(model(ids, output_attentions=True).attentions, stock, strict=True):
            assert_close(ours, theirs)

    def test_the_forward_schedule_knows_no_exception(self):
        """Stock static YaRN stretches layers with a window too."""
        model, ids = tiny("mistral-window"), random_ids(LENGTH)
        stock = tiny("mistral-window")
        rope = {"rope_type": "yarn", "factor": LENGTH / WINDOW}
        rope["original_max_position_embeddings"] = WINDOW
        stock.model.rotary_emb = type(stock.model.rotary_emb)(with_rope(stock.config, rope))
        expected = logits_of(stock, ids)
        patch_llama(model, schedule="forward")
        assert_close(logits_of(model, ids), expected)


def with_rope(config, rope):
    config = copy.deepcopy(config)
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **rope}
    else:
        config.rope_scaling = rope
    return config


class TestFrequenciesByLayerType:
    """Layers with a window keep frequencies of their own; others are stretched."""

    @pytest.mark.parametrize("case", ["gemma3_text", "olmo3"])
    def test_unpatching_gives_every_rotary_embedding_back(self, case):
        model, ids = tiny(case), random_ids(LENGTH)
        names, stock = [type(module) for module in model.modules()], logits_of(model, ids)
        with patch_llama(model):
            assert (logits_of(model, ids) - stock).abs().max() > 0.01
        assert [type(module) for module in model.modules()] == names
        assert torch.equal(logits_of(model, ids), stock)

    def test_the_forward_schedule_is_refused(self):
        with pytest.raises(ValueError, match=r"'gemma3_text'.* got \"forward\". Leave it out"):
            patch_llama(tiny("gemma3_text"), schedule="forward")

    @pytest.mark.parametrize("window", [None, 12])
    def test_a_window_past_the_trained_one_is_refused(self, window):
        model = tiny("gemma3_text")
        for layer in model.model.layers[::2]:
            layer.self_attn.sliding_window = window
        with pytest.raises(ValueError, match=rf"sliding_window must be at.* 11,.*got {window}"):
            patch_llama(model, original_max_position_embeddings=11)
        assert "Unrotated" not in str(model)

    def test_a_model_that_attends_both_ways_is_refused(self):
        model = tiny("gemma3_text")
        model.config.use_bidirectional_attention = True
        with pytest.raises(ValueError, match="causally, got use_bidirectional_attention=True"):
            patch_llama(model)

    def test_the_same_parameters_for_all_layers_are_refused(self, monkeypatch):
        """As OLMo 3 has them on transformers 5.0, which stretches its windows too."""
        monkeypatch.setattr(versions, "TRANSFORMERS", (5, 0))
        config = SimpleNamespace(model_type="olmo3", rope_parameters={"rope_theta": 5e5})
        with pytest.raises(ValueError, match=r"'olmo3' must be by layer type.*Upgrade"):
            resolve_schedule(config, DynamicYaRNConfig())


class TestVisionLanguage:
    def test_is_refused_where_it_attends_both_ways(self):
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        text = {
            **sizes,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": WINDOW,
            "sliding_window": 12,
            "pad_token_id": 0,
        }
        vision = {**sizes, "image_size": 16, "patch_size": 4}
        config = Gemma3Config(
            text_config=text,
            vision_config=vision,
            mm_tokens_per_image=4,
            image_token_index=VOCABULARY - 1,
        )
        model = Gemma3ForConditionalGeneration(config).eval()
        with pytest.raises(TypeError, match=r"around a Gemma3Model, .* \(model_type 'gemma3_text'"):
            patch_llama(model)
        ids = random_ids(20).clamp(max=VOCABULARY - 2)
        text_model = model.get_decoder()
        with patch_llama(text_model), pytest.raises(TypeError, match=r"mask must be .*got dict"):
            model(ids)
        assert torch.isfinite(logits_of(model, ids)).all()

    def test_is_served_through_its_text_model(self):
        text = {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": WINDOW,
            "initializer_range": 0.15,
            "pad_token_id": 0,
        }
        vision = {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "projection_dim": 32,
        }
        torch.manual_seed(0)
        config = LlavaConfig(
            text_config=text, vision_config=vision, image_token_index=VOCABULARY - 1
        )
        model = LlavaForConditionalGeneration(config).eval()
        model.generation_config.eos_token_id = -1
        ids = random_ids(50).clamp(max=VOCABULARY - 2)
        ids[0, 3:19] = VOCABULARY - 1  # the 16 patches of the image
        image = torch.randn(1, 3, 16, 16)
        stock = model(input_ids=ids, pixel_values=image).logits
        patch_llama(model, rescale_every=STEP)
        ours = model(input_ids=ids, pixel_values=image).logits
        assert_close(ours[:, :WINDOW], stock[:, :WINDOW])
        assert (ours[:, -1] - stock[:, -1]).abs().max() > 0.01
        cached = generate(model, ids, pixel_values=image, new_tokens=20)
        uncached = generate(model, ids, pixel_values=image, new_tokens=20, use_cache=False)
        assert torch.equal(cached, uncached)
