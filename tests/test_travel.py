"""A cache that travels: to a file, to plain values, to a device, and on past the window."""

import copy
import io
import json
import os
import pathlib
import pickle
import struct
from dataclasses import replace

import numpy
import oracle
import pytest
import torch
from conftest import (
    CACHE,
    WINDOW,
    assert_close,
    generate,
    left_padded,
    logits_of,
    random_ids,
    tiny_llama,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import DynamicCache, SmolLM3Config, SmolLM3ForCausalLM

from hf_dynyarn import DynamicYaRNCache, DynamicYaRNConfig, patch_llama, storage
from hf_dynyarn.rope_types import make_schedule

TEXT = random_ids(90)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": WINDOW,
    "factor": 4.0,
    "short_factor": [1.0 + index / 10 for index in range(8)],
    "long_factor": [1.0 + index for index in range(8)],
}


def filled(model, ids=TEXT[:, :40], rotated_copy=True, **kwargs):
    cache = DynamicYaRNCache(rotated_copy)
    logits_of(model, ids, cache, **kwargs)
    return cache


def by_file(cache, tmp_path):
    cache.save(tmp_path / "cache.safetensors")
    return DynamicYaRNCache.load(tmp_path / "cache.safetensors")


def by_torch_save(cache, tmp_path):
    torch.save(cache.state_dict(), tmp_path / "cache.pt")
    return DynamicYaRNCache.from_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))


def by_state_dict(cache, tmp_path):
    return DynamicYaRNCache.from_state_dict(cache.state_dict())


@pytest.fixture(params=[by_file, by_torch_save, by_state_dict])
def travelled(request, tmp_path):
    """Sends a cache on a journey and returns the one that arrives."""
    return lambda cache: request.param(cache, tmp_path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


def assert_same(actual, expected):
    """Two caches hold the same bits under the same options."""
    assert actual.schedule == expected.schedule
    assert (actual.packed, actual.rotated_copy) == (expected.packed, expected.rotated_copy)
    assert actual.get_seq_length() == expected.get_seq_length()
    assert actual.scales == expected.scales
    assert len(actual.layers) == len(expected.layers)
    assert (actual.positions is None) == (expected.positions is None)
    if actual.positions is not None:
        assert torch.equal(actual.positions, expected.positions)
    for own, theirs in zip(actual.layers, expected.layers, strict=True):
        for name in ("keys", "values"):
            mine, other = getattr(own, name), getattr(theirs, name)
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other)


class TestRoundTrip:
    @pytest.mark.parametrize("rotated_copy", [True, False], ids=["rotated copy", "no copy"])
    @pytest.mark.parametrize(
        "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
    )
    def test_each_dtype_bit_for_bit(self, model, travelled, dtype, rotated_copy):
        patch_llama(model.to(dtype), max_scale=3.0)
        cache = filled(model, rotated_copy=rotated_copy)
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


class TestCrashWhileSaving:
    @pytest.fixture
    def caches(self, model, path):
        """An older cache, saved, and a newer one."""
        patch_llama(model)
        older, newer = filled(model), filled(model, TEXT[:, :50])
        older.save(path)
        return older, newer

    def half(self, tensors, filename, metadata=None):
        with open(filename, "wb") as file:
            file.write(b"half of")
        raise self.error

    @pytest.mark.parametrize("step", ["save_file", "os.fsync", "os.replace"])
    @pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
    def test_the_older_file_stays(self, caches, path, monkeypatch, step, error):
        older, newer = caches
        self.error = error

        def fail(*args):
            raise error

        target = storage if step == "save_file" else os
        fails = self.half if step == "save_file" else fail
        monkeypatch.setattr(target, step.removeprefix("os."), fails)
        with pytest.raises(type(error)):
            newer.save(path)
        monkeypatch.undo()
        assert os.listdir(path.parent) == [path.name]
        assert_same(DynamicYaRNCache.load(path), older)
        newer.save(path)
        assert_same(DynamicYaRNCache.load(path), newer)

    def test_what_safetensors_cannot_write_is_an_os_error(self, caches, path, monkeypatch):
        self.error = SafetensorError("I/O error")
        monkeypatch.setattr(storage, "save_file", self.half)
        with pytest.raises(OSError, match=r"could not be written to '.*cache.safetensors': I/O"):
            caches[1].save(path)
        assert os.listdir(path.parent) == [path.name]

    def test_no_such_folder(self, tmp_path):
        with pytest.raises(OSError, match="could not be written to"):
            DynamicYaRNCache().save(tmp_path / "nowhere" / "cache.safetensors")
        assert os.listdir(tmp_path) == []

    def test_a_folder_in_its_place(self, tmp_path):
        with pytest.raises(IsADirectoryError):
            DynamicYaRNCache().save(tmp_path)
        assert os.listdir(tmp_path) == []


def rewritten(path, header=None, tensors=None, metadata=None):
    """Writes the file anew, with changes, and a checksum that is right."""
    with safe_open(path, framework="pt") as file:
        held = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        old = json.loads(file.metadata()["hf_dynyarn"])
    text = json.dumps({**old, **(header or {})})
    held = {**held, **(tensors or {})}
    held = {name: part for name, part in held.items() if part is not None}
    checked = {"hf_dynyarn": text, "crc32": storage._checksum(text, held)}
    save_file(held, path, checked if metadata is None else metadata)


class TestRefusedFiles:
    @pytest.fixture
    def saved(self, model, path):
        patch_llama(model)
        filled(model, TEXT[:, :4]).save(path)
        return path

    def test_no_file(self, path):
        with pytest.raises(FileNotFoundError):
            DynamicYaRNCache.load(path)

    @pytest.mark.parametrize("keep", [0, 4, 100, -1])
    def test_truncated(self, saved, keep):
        saved.write_bytes(saved.read_bytes()[:keep])
        with pytest.raises(ValueError, match=r"must be a whole file.*damaged.*Save the cache ag"):
            DynamicYaRNCache.load(saved)

    def test_any_flipped_bit(self, saved):
        """One in each byte of the header, and some in the tensors."""
        whole = bytearray(saved.read_bytes())
        header = 8 + struct.unpack("<Q", whole[:8])[0]
        for index in [*range(header), *range(header, len(whole), 37)]:
            whole[index] ^= 1 << index % 8
            saved.write_bytes(whole)
            whole[index] ^= 1 << index % 8
            with pytest.raises(ValueError, match=r"must .*got"):
                DynamicYaRNCache.load(saved)

    def test_a_flipped_bit_of_a_key(self, saved):
        whole = bytearray(saved.read_bytes())
        whole[-1] ^= 1
        saved.write_bytes(whole)
        with pytest.raises(ValueError, match="damaged or something else: contents with the check"):
            DynamicYaRNCache.load(saved)

    @pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
    def test_a_safetensors_file_of_something_else(self, path, metadata):
        save_file({"weight": torch.ones(2, 3)}, path, metadata)
        with pytest.raises(ValueError, match=r"must be a file that DynamicYaRNCache.save\(\) wro"):
            DynamicYaRNCache.load(path)

    @pytest.mark.parametrize("contents", [b"", b"a text, and no tensors" * 9, pickle.dumps(1)])
    def test_a_file_of_something_else(self, path, contents):
        path.write_bytes(contents)
        with pytest.raises(ValueError, match="damaged or something else"):
            DynamicYaRNCache.load(path)

    def test_a_newer_format(self, saved):
        rewritten(saved, {"version": 2, "paged": True})
        with pytest.raises(ValueError, match=r"must be version 1.*got 2\. Install the hf_dynyarn"):
            DynamicYaRNCache.load(saved)

    def test_a_header_that_is_no_json(self, saved):
        rewritten(saved, metadata={"hf_dynyarn": "{"})
        with pytest.raises(ValueError, match="a header that is no JSON"):
            DynamicYaRNCache.load(saved)

    @pytest.mark.parametrize(
        ("header", "tensors", "message"),
        [
            ({"version": None}, {}, "must be version 1"),
            ({"packed": "no"}, {}, "of the right types"),
            ({"colour": 1}, {}, "of the right types"),
            ({"layers": 2}, {}, r"its 2 layers and no others.*layers\.2\.keys"),
            ({"layers": 0}, {}, "a schedule where it has layers"),
            ({"schedule": None}, {}, "a schedule where it has layers"),
            ({"schedule": {"kind": "Other", "options": {}}}, {}, "one of the kinds.*got.*Other"),
            ({"schedule": {"kind": "NTKSchedule", "options": {"a": 1}}}, {}, "of the kinds"),
            ({"schedule": {}}, {}, "of the kinds"),
            ({}, {"layers.1.keys": None}, r"its 3 layers and no others.*layers\.1\.keys"),
            ({}, {"layers.3.keys": torch.ones(1)}, r"no others.*layers\.3\.keys"),
            ({}, {"positions": torch.zeros(1, 4)}, r"positions \(B, T\) of int64"),
            ({}, {"positions": torch.zeros(4).long()}, r"positions \(B, T\) of int64"),
            ({}, {"positions": torch.zeros(2, 4).long()}, r"'layers.0.keys' as \(2, 'Hkv', 4"),
            ({}, {"layers.2.values": torch.ones(1, 2, 3, 16)}, r"'layers.2.values' as \(1"),
            ({}, {"layers.2.values": torch.ones(())}, "'layers.2.values' as"),
            ({}, {"layers.2.values": torch.ones(1, 2, 4)}, "'layers.2.values' as"),
            ({}, {"layers.2.keys": torch.ones(1, 2, 4, 16).long()}, "of floats, got.*int64"),
        ],
    )
    def test_contents_that_do_not_fit(self, saved, header, tensors, message):
        rewritten(saved, header, tensors)
        with pytest.raises(ValueError, match=message):
            DynamicYaRNCache.load(saved)


class TestRefusedStates:
    def test_no_dict(self):
        with pytest.raises(TypeError, match=r"must be a dict, got list\. Pass what .*state_dict"):
            DynamicYaRNCache.from_state_dict([])

    @pytest.mark.parametrize("state", [{}, {"weight": torch.ones(1)}, {"hf_dynyarn": 1}])
    def test_of_something_else(self, state):
        with pytest.raises(ValueError, match="must have a dict with a version"):
            DynamicYaRNCache.from_state_dict(state)

    def test_a_newer_format(self):
        state = DynamicYaRNCache().state_dict()
        state["hf_dynyarn"]["version"] = 2
        with pytest.raises(ValueError, match="must be version 1"):
            DynamicYaRNCache.from_state_dict(state)

    def test_what_is_no_tensor(self, model):
        patch_llama(model)
        state = filled(model).state_dict()
        state["positions"] = [[0]]
        with pytest.raises(ValueError, match="must have tensors, got a list as 'positions'"):
            DynamicYaRNCache.from_state_dict(state)

    def test_weights_only_is_enough(self, model):
        """And needed: the cache itself is code, which it refuses."""
        patch_llama(model)
        file = io.BytesIO()
        torch.save(filled(model), file)
        file.seek(0)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(file, weights_only=True)


class TestRefusedModels:
    """A cache is refused with the reason, and is as it was."""

    def refused(self, model, cache, message):
        before = copy.deepcopy(cache)
        with pytest.raises(ValueError, match=message):
            logits_of(model, TEXT[:, 40:], cache)
        assert_same(cache, before)
        assert all(layer.get_seq_length() == 40 for layer in cache.layers)

    def test_other_options(self, model, travelled):
        patch_llama(model, rescale_every=7)
        cache = travelled(filled(model))
        patch_llama(model, rescale_every=8)
        self.refused(model, cache, r"rescale_every=7.*got.*rescale_every=8.*Start a new")

    def test_another_window(self, model, travelled):
        other = tiny_llama(max_position_embeddings=64)
        patch_llama(model, rescale_every=1)
        patch_llama(other, rescale_every=1)
        cache = travelled(filled(other))
        self.refused(model, cache, r"embeddings=64.*got.*embeddings=32")

    def test_a_model_that_is_not_patched(self, model, travelled):
        other = tiny_llama()
        patch_llama(other)
        cache = travelled(filled(other))
        with pytest.raises(TypeError, match=r"Call patch_llama\(model\) first"):
            logits_of(model, TEXT[:, 40:], cache)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_hidden_layers": 2}, "with 2 layers, got 3"),
            ({"num_key_value_heads": 4}, "with 4 heads of 16 dimensions in its keys, got 2 of 16"),
            ({"num_key_value_heads": 1}, "with 1 heads of 16 dimensions in its keys, got 2 of 16"),
        ],
        ids=["layers", "more heads", "fewer heads"],
    )
    def test_another_shape(self, model, travelled, changes, message):
        other = tiny_llama(**changes)
        patch_llama(model)
        patch_llama(other)
        self.refused(model, travelled(filled(other)), message)

    def test_another_head_dim(self, model, travelled):
        """Under equal options, which would be refused first."""
        other = tiny_llama(head_dim=32)
        patch_llama(model)
        patch_llama(other)
        cache = filled(other)
        cache.schedule = replace(cache.schedule, rotary_dim=16)
        self.refused(model, travelled(cache), "2 heads of 32 dimensions in its keys, got 2 of 16")

    def test_before_any_layer_runs(self, model, monkeypatch):
        other = tiny_llama(num_key_value_heads=4)
        patch_llama(model)
        patch_llama(other)
        cache = filled(other)
        monkeypatch.setattr(DynamicYaRNCache, "begin", None)
        self.refused(model, cache, "with 4 heads")

    def test_heads_split_between_processes_are_checked_by_the_layers(self, model, monkeypatch):
        other = tiny_llama(num_key_value_heads=4)
        patch_llama(model)
        patch_llama(other)
        cache = filled(other)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        self.refused(model, cache, "new keys must have the dtype, batch, heads")

    def test_another_batch_size(self, model, travelled):
        patch_llama(model)
        cache = travelled(filled(model))
        with pytest.raises(ValueError, match="batch size of the cache, 1, got 2"):
            logits_of(model, random_ids(3, rows=2), cache)

    def test_another_dtype(self, model, travelled):
        patch_llama(model)
        cache = travelled(filled(model))
        self.refused(model.to(torch.bfloat16), cache, r"new keys must have the dtype.*float32")


class TestDevices:
    """There is no GPU here: `meta`, which has shapes and no data, is the other device."""

    def tensors(self, cache):
        for layer in cache.layers:
            yield from (layer.keys, layer.values, layer.rotated._buffer)
        yield cache.positions

    def test_to_returns_the_cache_itself(self, model):
        patch_llama(model)
        cache, before = filled(model), filled(model)
        assert cache.to("cpu") is cache
        assert_same(cache, before)
        assert cache.layers[0].rotated._last == 40  # nothing to rotate again
        expected = logits_of(model, TEXT, use_cache=False)[:, 40:]
        assert_close(logits_of(model, TEXT[:, 40:], cache), expected)

    def test_to_moves_everything(self, model):
        patch_llama(model)
        cache = filled(model).to("meta")
        assert {part.device.type for part in self.tensors(cache)} == {"meta"}
        assert cache.get_seq_length() == 40

    def test_an_empty_cache(self):
        assert DynamicYaRNCache().to("cpu").to(torch.device("cpu")).get_seq_length() == 0

    def test_load_onto_a_device(self, model, path):
        patch_llama(model)
        filled(model).save(path)
        cache = DynamicYaRNCache.load(path, device="meta")
        assert {layer.keys.device.type for layer in cache.layers} == {"meta"}
        assert cache.positions.device.type == "meta"
        assert DynamicYaRNCache.load(path, device="cpu").scales == [40 / 32]

    def test_a_layer_follows_its_model(self, model):
        """A loaded cache is on the CPU, while each layer of the model may be somewhere else."""
        patch_llama(model)
        cache, call = filled(model), torch.nn.Module()
        cache.begin(call)
        new = torch.empty(1, 2, 5, 16, device="meta")
        with torch.no_grad():
            keys, values = cache.update(new, new, 1)
        assert (keys.shape, keys.device.type) == ((1, 2, 45, 16), "meta")
        assert values.device.type == cache.layers[1].rotated._buffer.device.type == "meta"
        assert cache.layers[0].keys.device.type == "cpu"

    def test_positions_follow_the_newest(self, model):
        patch_llama(model)
        cache = filled(model)
        cache.commit(torch.empty((1, 5), dtype=torch.int64, device="meta"), cache.schedule, False)
        assert (cache.positions.shape, cache.positions.device.type) == ((1, 45), "meta")

    def test_to_leaves_an_unfinished_forward_call_alone(self, model):
        """As accelerate's hooks call it, at every layer, where they are not told to skip it."""
        patch_llama(model)
        cache = filled(model)
        expected = logits_of(model, TEXT, use_cache=False)[:, 40:]
        hook = model.model.layers[1].register_forward_pre_hook(
            lambda module, args: cache.to("meta") and None
        )
        assert_close(logits_of(model, TEXT[:, 40:], cache), expected)
        hook.remove()


class TestOffloading:
    """Refused: layers that come and go would need a GPU to be tested on."""

    def test_asked_of_the_cache(self):
        with pytest.raises(TypeError, match=r"offloading must be False, got True.*cache\.to\("):
            DynamicYaRNCache(offloading=True)

    def test_a_cache_of_transformers(self, model):
        patch_llama(model)
        cache = DynamicCache(offloading=True)
        with pytest.raises(TypeError, match="must be a DynamicYaRNCache, got an offloaded Dynamic"):
            logits_of(model, TEXT, cache)
        assert cache.get_seq_length() == 0

    @pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
    def test_asked_of_generate(self, model, name):
        patch_llama(model)
        with pytest.raises(TypeError, match="cache of a patched model must be a DynamicYaRNCache"):
            generate(model, TEXT, cache_implementation=name)
