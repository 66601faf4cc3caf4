"""Patching a model, and undoing it."""

import copy
import json
import logging
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from conftest import WINDOW, generate, logits_of, random_ids, tiny_config, tiny_llama, traces
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from hf_dynyarn import DynamicYaRNConfig, patch_llama, unpatch_llama

LONG = random_ids(70)


def is_patched(model):
    """Whether the model stretches: past the window its logits are not those of its stock twin."""
    twin = copy.deepcopy(model)
    unpatch_llama(twin)
    return not torch.equal(
        logits_of(model, LONG, use_cache=False), logits_of(twin, LONG, use_cache=False)
    )


class TestOneModel:
    def test_handle_removes(self, model):
        stock = logits_of(model, LONG)
        handle = patch_llama(model)
        assert not torch.equal(logits_of(model, LONG), stock)
        handle.remove()
        assert torch.equal(logits_of(model, LONG), stock)
        handle.remove()
        assert torch.equal(logits_of(model, LONG), stock)

    def test_context_manager_removes_even_after_an_error(self, model):
        stock = logits_of(model, LONG)
        with pytest.raises(RuntimeError, match="of the user"), patch_llama(model):
            assert not torch.equal(logits_of(model, LONG), stock)
            raise RuntimeError("of the user")
        assert torch.equal(logits_of(model, LONG), stock)

    def test_unpatch_removes(self, model):
        stock = logits_of(model, LONG)
        patch_llama(model)
        unpatch_llama(model)
        assert torch.equal(logits_of(model, LONG), stock)
        unpatch_llama(model)

    def test_removal_leaves_nothing_of_ours(self, model):
        before = traces(model)
        patch_llama(model).remove()
        assert traces(model) == before

    def test_config_object_and_keywords_are_the_same(self, model):
        patch_llama(model, DynamicYaRNConfig(rescale_every=9, max_scale=1.5))
        one = logits_of(model, LONG)
        unpatch_llama(model)
        patch_llama(model, rescale_every=9, max_scale=1.5)
        assert torch.equal(logits_of(model, LONG), one)
        patch_llama(model, rescale_every=9)
        assert not torch.equal(logits_of(model, LONG), one)

    def test_patching_twice_replaces_the_options_and_says_so_once(self, model, caplog):
        stock = logits_of(model, LONG)
        patch_llama(model, rescale_every=1)
        first = logits_of(model, LONG)
        with caplog.at_level(logging.WARNING):
            handle = patch_llama(model, rescale_every=50)
        assert [record.getMessage().count("replaces") for record in caplog.records] == [1]
        assert not torch.equal(logits_of(model, LONG), first)
        handle.remove()
        assert torch.equal(logits_of(model, LONG), stock)

    def test_other_models_stay_stock_even_with_the_same_config(self):
        config = tiny_config()
        one, other = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
        assert one.config is other.config
        stock = logits_of(other, LONG)
        patch_llama(one)
        assert torch.equal(logits_of(other, LONG), stock)
        other_cache = DynamicCache()
        logits_of(other, LONG, other_cache)
        assert type(other_cache) is DynamicCache

    @pytest.mark.parametrize(
        "wrap", [lambda model: model.model, nn.Sequential], ids=["decoder", "wrapper"]
    )
    def test_takes_the_decoder_or_a_wrapper(self, model, wrap):
        patch_llama(wrap(model))
        assert is_patched(model)
        unpatch_llama(wrap(model))
        assert not is_patched(model)

    def test_takes_other_heads(self):
        model = LlamaForSequenceClassification(tiny_config()).eval()
        stock = model(LONG).logits
        patch_llama(model)
        assert not torch.equal(model(LONG).logits, stock)

    def test_a_kept_handle_does_not_keep_the_model(self):
        model = tiny_llama(num_hidden_layers=1)
        handle = patch_llama(model)
        gone = weakref.ref(model.model)
        del model
        assert gone() is None, "freed at once, without the garbage collector"
        handle.remove()

    def test_deep_copies_are_patched_and_unpatched_by_themselves(self, model):
        stock = logits_of(model, LONG)
        patch_llama(model)
        patched = logits_of(model, LONG)
        twin = copy.deepcopy(model)
        unpatch_llama(model)
        assert torch.equal(logits_of(model, LONG), stock)
        assert torch.equal(logits_of(twin, LONG), patched)
        unpatch_llama(twin)
        assert traces(twin) == traces(model)
        assert torch.equal(logits_of(twin, LONG), stock)

    def test_pickled_models_stay_patched(self, model):
        patch_llama(model)
        twin = pickle.loads(pickle.dumps(model))
        assert torch.equal(logits_of(twin, LONG), logits_of(model, LONG))
        unpatch_llama()
        assert not is_patched(twin)

    def test_handles_of_a_patch_and_of_its_replacement(self, model):
        stock = logits_of(model, LONG)
        first = patch_llama(model)
        patch_llama(model, rescale_every=9)
        first.remove()
        assert torch.equal(logits_of(model, LONG), stock)
        patch_llama(model)
        first.remove()
        assert not torch.equal(logits_of(model, LONG), stock), "removing twice does nothing more"

    def test_removal_after_pruning(self, model):
        stock, handle = tiny_llama(), patch_llama(model)
        for one in (model, stock):
            one.model.layers = one.model.layers[:2]
            one.config.num_hidden_layers = 2
        handle.remove()
        assert traces(model) == traces(stock)
        assert torch.equal(logits_of(model, LONG), logits_of(stock, LONG))

    def test_moves_between_dtypes_while_patched(self, model):
        twin = copy.deepcopy(model).double()
        patch_llama(model)
        model.double()
        unpatch_llama(model)
        assert torch.equal(logits_of(model, LONG), logits_of(twin, LONG))
        assert model.model.rotary_emb.inv_freq.dtype == torch.float64


class TestSavingAndLoading:
    def test_nothing_of_ours_is_saved(self, model, tmp_path):
        model.save_pretrained(tmp_path / "stock")
        patch_llama(model)
        assert list(model.state_dict()) == list(tiny_llama().state_dict())
        model.save_pretrained(tmp_path / "patched")
        saved = [
            json.loads((tmp_path / name / "config.json").read_text())
            for name in ("stock", "patched")
        ]
        assert saved[0] == saved[1]
        assert "dynamic_yarn" not in (tmp_path / "patched" / "config.json").read_text()

    @pytest.mark.parametrize("class_wide", [True, False])
    @pytest.mark.parametrize("how", [{}, {"device_map": "cpu"}, {"dtype": torch.bfloat16}], ids=str)
    def test_loaded_models(self, model, tmp_path, class_wide, how):
        model.save_pretrained(tmp_path)
        patch_llama(model)
        if "dtype" in how:
            model.to(how["dtype"])
        expected = logits_of(model, LONG)
        if class_wide:
            patch_llama()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **how).eval()
        if not class_wide:
            patch_llama(loaded)
        assert torch.equal(logits_of(loaded, LONG), expected)

    def test_meta_device(self, model):
        """Patched while it has no data at all, filled afterwards."""
        with torch.device("meta"):
            empty = LlamaForCausalLM(model.config)
        patch_llama(empty)
        empty.to_empty(device="cpu")
        empty.load_state_dict(model.state_dict())
        patch_llama(model)
        assert torch.equal(logits_of(empty.eval(), LONG), logits_of(model, LONG))

    def test_device_map_with_layers_on_disk(self, model, tmp_path):
        model.save_pretrained(tmp_path / "model")
        patch_llama(model)
        expected = generate(model, LONG)
        places = {
            "model.embed_tokens": "cpu",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        }
        places |= {
            f"model.layers.{index}": place for index, place in enumerate(("cpu", "disk", "cpu"))
        }
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
        )
        patch_llama(loaded.eval())
        assert torch.equal(generate(loaded, LONG), expected)
        unpatch_llama(loaded)
        unpatch_llama(model)
        assert torch.equal(logits_of(loaded, LONG), logits_of(model, LONG))

    def test_import_patches_nothing_and_imports_no_kernels(self):
        code = (
            "import sys, transformers.models.llama.modeling_llama as llama\n"
            "before = {'flash_attn', 'triton'} & set(sys.modules)\n"
            "import hf_dynyarn\n"
            "assert {'flash_attn', 'triton'} & set(sys.modules) == before\n"
            "assert '__call__' not in vars(llama.PreTrainedModel)\n"
        )
        subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", code], check=True)


def test_window_is_respected(model):
    """The tests rest on a window of 32 tokens."""
    assert model.config.max_position_embeddings == WINDOW
