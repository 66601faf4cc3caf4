"""What a layer sees within the window is what the mask of the stock model shows it."""

import pytest
import torch
from conftest import ROUNDING, assert_close, logits_of, random_ids
from families import BACKENDS, CASES, MORE, STEP, tiny

from hf_dynyarn import DynamicYaRNCache, patch_llama
from hf_dynyarn.models import FAMILIES

SHORT = 3  # tokens: far fewer than a test reads
TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
ON, OFF = {"use_sliding_window": True}, {"use_sliding_window": False}

# Every way in which the config of some family says it; the others ignore it.
WINDOWS = {
    "none": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "one": {"sliding_window": SHORT},
    "on": {**ON, "sliding_window": SHORT, "max_window_layers": 2},
    "off": {**OFF, "sliding_window": SHORT},
    "by layer": {"sliding_window": SHORT, "layer_types": TYPES},
    "by layer, on": {**ON, "sliding_window": SHORT, "layer_types": TYPES},
    "by layer, off": {**OFF, "sliding_window": SHORT, "layer_types": TYPES},
    "all full": {"sliding_window": SHORT, "layer_types": ["full_attention"] * 4},
    "by layer, without a size": {"sliding_window": None, "layer_types": TYPES},
}


def windowed(monkeypatch, model_type, window, backend="sdpa"):
    options, kinds = CASES[model_type]
    options = {name: value for name, value in options.items() if name != "layer_types"}
    monkeypatch.setitem(MORE, f"{model_type}-swept", ({**options, **window}, kinds))
    return tiny(f"{model_type}-swept", backend)


# Their decoders go by `layer_types`.
BY_TYPE = ("cohere2", "exaone4", "gemma3_text", "gpt_oss", "ministral", "olmo3")
BY_TYPE += ("qwen2", "qwen2_moe", "qwen3", "smollm3")


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_is_stock_whatever_the_windows(monkeypatch, model_type, window):
    backends = BACKENDS.get(model_type, ["sdpa", "eager"])
    model, ids = windowed(monkeypatch, model_type, window, backends[0]), random_ids(12, rows=2)
    no_size = model_type in BY_TYPE and not model.config.sliding_window
    if no_size and "sliding_attention" in model.config.layer_types:  # stock fails, or sees nothing
        with pytest.raises(ValueError, match=r"sliding_window .*must be at (least 1|most)"):
            patch_llama(model)
        return
    for backend in backends:
        model.set_attn_implementation(backend)
        try:
            stock = logits_of(model, ids, use_cache=False)
        except (TypeError, ValueError):  # over the mask of a window that no layer has
            assert no_size
            return
        with patch_llama(model):
            assert_close(logits_of(model, ids), stock)


ITS_MASK_ALONE = [
    ("qwen2_moe", {**ON, "sliding_window": SHORT, "max_window_layers": 2}),
    ("smollm3", {**OFF, "sliding_window": SHORT, "layer_types": TYPES}),
]


@pytest.mark.parametrize(("model_type", "window"), ITS_MASK_ALONE, ids=["qwen2_moe", "smollm3"])
class TestMaskAlone:
    """The attention of these is not told of their windows."""

    def test_the_window_is_there(self, monkeypatch, model_type, window):
        model = windowed(monkeypatch, model_type, window)
        full = windowed(monkeypatch, model_type, WINDOWS["none"])
        ids = random_ids(12)
        assert (logits_of(model, ids) - logits_of(full, ids)).abs().max() > 0.1

    @pytest.mark.parametrize("rotated_copy", [True, False])
    def test_is_the_same_cached(self, monkeypatch, model_type, window, rotated_copy):
        model, ids = windowed(monkeypatch, model_type, window), random_ids(50)
        patch_llama(model, rescale_every=STEP)
        whole = logits_of(model, ids)
        cache = DynamicYaRNCache(rotated_copy=rotated_copy)
        parts = [logits_of(model, part, cache) for part in ids.split([9, 1, 1, 25, 1, 12, 1], 1)]
        assert_close(torch.cat(parts, dim=1), whole, 3 * ROUNDING)

    def test_a_custom_mask_stands_for_all(self, monkeypatch, model_type, window):
        model, ids = windowed(monkeypatch, model_type, window), random_ids(12)
        mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
        stock = logits_of(model, ids, attention_mask=mask)
        patch_llama(model)
        assert_close(logits_of(model, ids, attention_mask=mask), stock)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "smollm3"])
def test_a_window_set_in_the_config_after_patching(monkeypatch, model_type):
    """Stock's mask reads it at each call."""
    model = windowed(monkeypatch, model_type, WINDOWS["by layer, on"])
    ids = random_ids(12)
    model.config.sliding_window = 5
    stock = logits_of(model, ids, use_cache=False)
    model.config.sliding_window = SHORT
    patch_llama(model)
    assert (logits_of(model, ids) - stock).abs().max() > 0.1
    model.config.sliding_window = 5
    assert_close(logits_of(model, ids), stock)
