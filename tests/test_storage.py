"""A cache as plain values and as a file, and on past the window."""

import copy
import os
import pathlib

import numpy
import oracle
import pytest
import torch
from conftest import (
    CACHE,
    TEXT,
    WINDOW,
    assert_close,
    assert_same,
    filled,
    generate,
    left_padded,
    logits_of,
    random_ids,
    tiny_llama,
)
from safetensors import safe_open
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from hf_dynyarn import DynamicYaRNCache, DynamicYaRNConfig, patch_llama
from hf_dynyarn.rope_types import make_schedule

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": WINDOW,
    "factor": 4.0,
    "short_factor": [1.0 + index / 10 for index in range(8)],
    "long_factor": [1.0 + index for index in range(8)],
}


class TestRoundTrip:
    @pytest.mark.parametrize("rotated_copy", [True, False], ids=["rotated copy", "no copy"])
    @pytest.mark.parametrize(
        "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
    )
    def test_each_dtype_bit_for_bit(self, model, travelled, dtype, rotated_copy):
        patch_llama(model.to(dtype), max_scale=3.0)
        cache = filled(model, cache=DynamicYaRNCache(rotated_copy))
        assert cache.layers[0].keys.dtype == dtype
        assert_same(travelled(cache), cache)

    def test_padded_batch(self, model, travelled):
        ids, mask = left_padded([random_ids(length, seed=length)[0] for length in (50, 20, 33)])
        patch_llama(model, rescale_every=7)
        cache = filled(model, ids, attention_mask=mask)
        other = travelled(cache)
        assert_same(other, cache)
        assert (other.positions < 0).sum() == 30 + 17
        following = random_ids(20, rows=3)
        mask = torch.cat((mask, torch.ones(3, 20)), 1)
        expected = logits_of(model, following, cache, attention_mask=mask)
        assert torch.equal(logits_of(model, following, other, attention_mask=mask), expected)

    def test_packed_documents(self, model, travelled):
        positions = torch.cat((torch.arange(20), torch.arange(35)))[None]
        patch_llama(model)
        cache = filled(model, TEXT[:, :55], position_ids=positions)
        other = travelled(cache)
        assert other.packed
        assert_same(other, cache)
        solo = logits_of(model, TEXT[:, 20:], use_cache=False)[:, 35:]
        assert_close(logits_of(model, TEXT[:, 55:], other), solo)

    def test_empty(self, model, travelled):
        cache = travelled(DynamicYaRNCache(rotated_copy=False))
        assert_same(cache, DynamicYaRNCache(rotated_copy=False))
        patch_llama(model)
        assert_close(logits_of(model, TEXT, cache), logits_of(model, TEXT, use_cache=False))

    def test_emptied_again(self, model, travelled):
        patch_llama(model)
        cache = filled(model)
        cache.crop(-40)
        assert_same(travelled(cache), DynamicYaRNCache())

    def test_after_crop(self, model, travelled):
        patch_llama(model)
        cache = filled(model, TEXT[:, :60])
        cache.crop(-15)
        other = travelled(cache)
        assert_same(other, cache)
        expected = logits_of(model, TEXT, use_cache=False)[:, 45:]
        assert_close(logits_of(model, TEXT[:, 45:], other), expected)

    def test_filled_with_gradients(self, model, travelled):
        patch_llama(model)
        cache = DynamicYaRNCache()
        model(TEXT[:, :40], **{CACHE: cache})
        other = travelled(cache)
        assert_same(other, cache)
        assert not other.layers[0].keys.requires_grad

    def test_filled_in_inference_mode(self, model, travelled):
        patch_llama(model)
        with torch.inference_mode():
            other = travelled(filled(model))
        expected = logits_of(model, TEXT, use_cache=False)[:, 40:]
        assert_close(logits_of(model, TEXT[:, 40:], other), expected)

    def test_layers_that_rotate_nothing(self, travelled):
        config = SmolLM3Config(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=WINDOW,
            no_rope_layers=[1, 0, 1, 0],
            pad_token_id=0,
        )
        torch.manual_seed(0)
        model = SmolLM3ForCausalLM(config).eval()
        patch_llama(model)
        cache = filled(model)
        other = travelled(cache)
        assert_same(other, cache)
        expected = logits_of(model, TEXT, use_cache=False)[:, 40:]
        assert_close(logits_of(model, TEXT[:, 40:], other), expected)


class TestSchedules:
    """Equal to one that is freshly made, or the model would refuse its own cache."""

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "default", "rope_theta": 10000.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "attention_factor": 1},
            LONGROPE,
        ],
        ids=lambda rope: rope["rope_type"],
    )
    def test_every_kind(self, model, travelled, rope):
        schedule = make_schedule(rope, 16, WINDOW, DynamicYaRNConfig())
        patch_llama(model)
        cache = filled(model)
        cache.schedule = schedule
        other = travelled(cache)
        assert other.schedule == schedule
        assert type(other.schedule) is type(schedule)
        assert hash(other.schedule) == hash(schedule)

    def test_numbers_of_numpy(self, model, travelled):
        options = {"rescale_every": numpy.int64(7), "attention_factor": numpy.float32(1.1)}
        patch_llama(model, **options)
        other = travelled(filled(model))
        expected = logits_of(model, TEXT, use_cache=False)[:, 40:]
        assert_close(logits_of(model, TEXT[:, 40:], other), expected)


class TestContinued:
    @pytest.mark.parametrize("saved", [20, WINDOW, 40])
    @pytest.mark.parametrize("step", [1, 7])
    def test_the_oracle_and_an_uninterrupted_cache(self, travelled, saved, step):
        model = tiny_llama().double()
        expected = oracle.llama_logits(model, TEXT[0].tolist(), WINDOW, step)
        patch_llama(model, rescale_every=step)
        cache = filled(model, TEXT[:, :saved])
        other = travelled(cache)
        for start in range(saved, 90, 5):
            piece = TEXT[:, start : start + 5]
            uninterrupted = logits_of(model, piece, cache)
            continued = logits_of(model, piece, other)
            assert torch.equal(continued, uninterrupted)
            assert_close(continued[0], expected[start : start + 5])

    @pytest.mark.parametrize("saved", [20, 40])
    def test_generate(self, model, travelled, saved):
        patch_llama(model)
        other = travelled(filled(model, TEXT[:, :saved]))
        prompt = TEXT[:, :50]
        expected = generate(model, prompt, use_cache=False)
        assert torch.equal(generate(model, prompt, other), expected)

    def test_by_another_copy_of_the_model(self, path):
        """All that goes from one to the other is the file."""
        first, second = tiny_llama(), tiny_llama()
        patch_llama(first)
        filled(first).save(path)
        patch_llama(second)
        cache = DynamicYaRNCache.load(path)
        expected = logits_of(first, TEXT, use_cache=False)[:, 40:]
        assert_close(logits_of(second, TEXT[:, 40:], cache), expected)

    def test_the_example_of_the_docs(self, model, tmp_path, monkeypatch):
        docs = pathlib.Path(__file__).parent.parent / "docs" / "options.md"
        if not docs.exists():
            pytest.skip("the docs are not here")
        section = docs.read_text().split("## Saving a cache")[1]
        example = section.split("```python")[1].split("```")[0]
        monkeypatch.chdir(tmp_path)
        patch_llama(model)
        names = {
            "DynamicYaRNCache": DynamicYaRNCache,
            "model": model,
            "prefix_ids": TEXT[:, :20],
            "inputs": {"input_ids": TEXT[:, :50], "attention_mask": torch.ones_like(TEXT[:, :50])},
        }
        with torch.no_grad():
            exec(example.replace("past_key_values", CACHE), names)
        assert os.listdir() == ["prefix.safetensors"]
        assert names["cache"].get_seq_length() > 50


class TestWhatIsWritten:
    def test_no_spare_room_and_no_rotated_copy(self, model, path):
        patch_llama(model)
        cache = filled(model)
        logits_of(model, TEXT[:, 40:41], cache)
        assert cache.layers[0]._keys.shape[2] > 41  # there is spare room
        cache.save(path)
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        held = [f"layers.{index}.{part}" for index in range(3) for part in ("keys", "values")]
        assert shapes == {"positions": [1, 41], **{name: [1, 2, 41, 16] for name in held}}

    def test_torch_save_writes_no_spare_room(self, model):
        patch_llama(model)
        cache = filled(model)
        logits_of(model, TEXT[:, 40:41], cache)
        state = cache.state_dict()
        for name, part in state.items():
            if name != "hf_dynyarn":
                assert part.untyped_storage().nbytes() == part.numel() * part.itemsize
        assert state["hf_dynyarn"]["schedule"]["options"]["max_scale"] == float("inf")

    def test_the_plain_form_is_a_copy(self, model):
        """Neither the cache that gave it nor one made of it writes to it."""
        patch_llama(model)
        cache = filled(model)
        state = cache.state_dict()
        before = copy.deepcopy(state)
        one, two = (DynamicYaRNCache.from_state_dict(state) for _ in range(2))
        mask = torch.ones(1, 35)
        mask[:, 30:32] = 0  # other positions than those that were there
        for seed, each in enumerate((cache, one, two)):
            each.crop(-10)
            logits_of(model, random_ids(5, seed=seed), each, attention_mask=mask)
        for name in state:
            assert name == "hf_dynyarn" or torch.equal(state[name], before[name])

    def test_a_forward_call_that_is_not_through(self, model, path):
        """Its tokens are left out, and it goes on as if nothing had been saved."""
        patch_llama(model)
        cache, before = filled(model), filled(model)
        expected = logits_of(model, TEXT, use_cache=False)[:, 40:]
        saves = model.model.layers[1].register_forward_hook(lambda *args: cache.save(path))
        assert_close(logits_of(model, TEXT[:, 40:], cache), expected)
        saves.remove()
        assert cache.get_seq_length() == 90
        assert_same(DynamicYaRNCache.load(path), before)

    def test_a_forward_call_that_failed(self, model, travelled):
        patch_llama(model)
        cache, before = filled(model), filled(model)

        def fail(*args):
            raise RuntimeError("out of luck")

        hook = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            logits_of(model, TEXT[:, 40:], cache)
        hook.remove()
        assert cache.layers[0].get_seq_length() == 90
        assert_same(travelled(cache), before)

    def test_a_layer_that_lacks_tokens(self, model, path):
        patch_llama(model)
        cache = filled(model)
        cache.layers[1].shorten(7)
        with pytest.raises(ValueError, match=r"must hold 40 tokens.*got 7.*cache\.crop\(\)"):
            cache.save(path)
        assert not path.exists()

    def test_a_link_stays_a_link(self, model, path, tmp_path):
        patch_llama(model)
        path.symlink_to(tmp_path / "elsewhere.safetensors")
        cache = filled(model)
        cache.save(path)
        assert path.is_symlink()
        assert_same(DynamicYaRNCache.load(tmp_path / "elsewhere.safetensors"), cache)
