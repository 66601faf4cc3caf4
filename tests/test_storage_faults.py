"""Files that could not be written, or are not what was written."""

import io
import json
import os
import pickle
import struct

import pytest
import torch
from conftest import TEXT, assert_same, filled
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_dynyarn import DynamicYaRNCache, patch_llama, storage


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
