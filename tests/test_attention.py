"""What the layers of a call share, and what they must not cost."""

import pytest
import torch
from conftest import assert_close, left_padded, logits_of, random_ids, tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dynyarn import DynamicYaRNCache, patch_llama, workspace
from hf_dynyarn.backends import fused


class Reads(TorchDispatchMode):
    """Counts what would synchronise with a device: reading a value, or looking for non-zeros."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.is_nonzero.default,
        ):
            self.count += 1
        return func(*args, **(kwargs or {}))


class TestCost:
    def reads(self, layers, patched, **kwargs):
        model = tiny_llama(num_hidden_layers=layers)
        if patched:
            patch_llama(model)
        with Reads() as reads, torch.no_grad():
            model(random_ids(50, rows=2), **kwargs)
        return reads.count

    @pytest.mark.parametrize("masked", [True, False])
    def test_no_layer_reads_a_value_from_its_device(self, masked):
        kwargs = (
            {"attention_mask": left_padded([torch.zeros(9), torch.zeros(50)])[1]} if masked else {}
        )
        assert self.reads(1, True, **kwargs) == self.reads(4, True, **kwargs)

    def test_tables_are_made_once_for_all_layers(self, monkeypatch):
        made, build = [], workspace.rotary_tables
        monkeypatch.setattr(
            workspace, "rotary_tables", lambda *args: made.append(1) or build(*args)
        )
        model = tiny_llama()
        patch_llama(model)
        cache = DynamicYaRNCache()
        logits_of(model, random_ids(20), cache)
        assert len(made) == 1
        logits_of(model, random_ids(1), cache)
        assert len(made) == 2


class TestFusedKernel:
    """Over un-rotated keys of which there is no copy, as where Triton has a device.

    Here the operation's own version for CPUs stands for the kernels.
    """

    @pytest.fixture
    def decoded(self, monkeypatch):
        """Numbers of queries that the operation was called with."""
        found, decode = [], fused.decode

        def recorded(query, *args, **kwargs):
            found.append(query.shape[2])
            return decode(query, *args, **kwargs)

        monkeypatch.setattr(fused, "has_kernels", lambda device_type: True)
        monkeypatch.setattr(fused, "decode", recorded)
        return found

    def test_decodes_steps_and_runs(self, decoded):
        model = tiny_llama()
        patch_llama(model, rescale_every=4)
        ids, mask = left_padded([random_ids(50)[0], random_ids(33, seed=1)[0]])
        parts = ids.split([30, 1, 9, 1, 9], dim=1)
        caches = DynamicYaRNCache(), DynamicYaRNCache(rotated_copy=False)
        done = 0
        for part in parts:
            done += part.shape[1]
            expected, logits = (
                logits_of(model, part, cache, attention_mask=mask[:, :done]) for cache in caches
            )
            shown = mask[:, done - part.shape[1] : done] > 0
            assert_close(logits[shown], expected[shown])
        assert {1, 4} <= set(decoded)

    @pytest.mark.parametrize("why", ["padding in the middle", "documents", "custom mask", "hidden"])
    def test_leaves_what_it_cannot_see(self, decoded, why):
        model = tiny_llama()
        patch_llama(model, rescale_every=4)
        cache = DynamicYaRNCache(rotated_copy=False)
        first, more = random_ids(40), random_ids(2, seed=1)
        before, after = {}, {}
        if why == "padding in the middle":
            before = {"attention_mask": (torch.arange(40) < 37).long()[None]}
        elif why == "documents":
            before = {"position_ids": (torch.arange(40) % 20)[None]}
        elif why == "hidden":
            after = {"attention_mask": (torch.arange(42) != 5).long()[None]}
        else:
            after = {"attention_mask": torch.ones(1, 1, 2, 42, dtype=torch.bool)}
        logits_of(model, first, cache, **before)
        decoded.clear()
        logits_of(model, more, cache, **after)
        assert not decoded
