"""What the layers of a call share, and what they must not cost."""

import pytest
import torch
from conftest import left_padded, logits_of, random_ids, tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dynyarn import DynamicYaRNCache, patch_llama, workspace


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
