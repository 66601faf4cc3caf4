"""Patching, unpatching, and everything that is refused."""

import copy
import gc
import json
import logging
import pickle
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

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
    tiny_config,
    tiny_llama,
)
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)
from transformers.models.auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_dynyarn import (
    DynamicYaRNCache,
    DynamicYaRNConfig,
    layers,
    patch,
    patch_llama,
    unpatch_llama,
    versions,
)

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

    def test_eager_attention_of_a_subclass(self):
        model = tiny_llama(attn_implementation="eager")

        class Subclass(LlamaAttention):
            pass

        Subclass.__module__ = __name__
        patch_llama(model)
        expected = logits_of(model, LONG)
        for layer in model.model.layers:
            layer.self_attn.__class__ = Subclass
        assert torch.equal(logits_of(model, LONG), expected)

    def test_moves_between_dtypes_while_patched(self, model):
        twin = copy.deepcopy(model).double()
        patch_llama(model)
        model.double()
        unpatch_llama(model)
        assert torch.equal(logits_of(model, LONG), logits_of(twin, LONG))
        assert model.model.rotary_emb.inv_freq.dtype == torch.float64

    def test_positional_arguments_reach_the_plan(self, model):
        ids, mask = left_padded([random_ids(20)[0], random_ids(50)[0]])
        patch_llama(model)
        by_name = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert torch.equal(model.model(ids, mask).last_hidden_state, by_name)


def traces(model):
    """Everything about a model that a patch could leave behind."""
    return {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "hooks": [
            (
                len(module._forward_pre_hooks),
                len(module._forward_hooks),
                len(module._forward_hooks_with_kwargs),
            )
            for module in model.modules()
        ],
        "configs": [
            module.config is model.config for module in model.modules() if hasattr(module, "config")
        ],
        "attention": model.config._attn_implementation,
        "state": list(model.state_dict()),
        "class": "__call__" in vars(PreTrainedModel),
    }


class TestClassWide:
    def test_models_already_loaded_and_loaded_later(self, model):
        stock = logits_of(model, LONG)
        patch_llama()
        later = tiny_llama()
        assert is_class_patched(model)
        assert is_class_patched(later)
        assert torch.equal(logits_of(later, LONG), logits_of(model, LONG))
        unpatch_llama()
        for one in (model, later):
            assert torch.equal(logits_of(one, LONG), stock)
            assert traces(one) == traces(tiny_llama())

    def test_handle_and_context_manager(self, model):
        stock = logits_of(model, LONG)
        with patch_llama(rescale_every=7) as handle:
            assert handle.config == DynamicYaRNConfig(rescale_every=7)
            assert not torch.equal(logits_of(model, LONG), stock)
        assert torch.equal(logits_of(model, LONG), stock)
        handle.remove()

    def test_generates_with_either_cache(self, model):
        patch_llama()
        expected = generate(model, LONG, use_cache=False)
        assert torch.equal(generate(model, LONG, DynamicYaRNCache()), expected)
        assert torch.equal(generate(model, LONG), expected)

    def test_leaves_alone_what_is_patched_by_itself(self, model):
        own = patch_llama(model, rescale_every=50)
        expected = logits_of(model, LONG)
        handle = patch_llama(rescale_every=1)
        assert torch.equal(logits_of(model, LONG), expected)
        handle.remove()
        assert torch.equal(logits_of(model, LONG), expected)
        own.remove()

    def test_twice_replaces_the_options_and_says_so_once(self, model, caplog):
        old = patch_llama(rescale_every=1)
        first = logits_of(model, LONG)
        with caplog.at_level(logging.WARNING):
            patch_llama(rescale_every=50)
        assert [record.getMessage().count("replaces") for record in caplog.records] == [1]
        second = logits_of(model, LONG)
        assert not torch.equal(first, second)
        unpatch_llama()
        old.remove()  # removes the patch that replaced it, so nothing here
        assert not torch.equal(logits_of(model, LONG), second)

    def test_unpatch_all_finds_every_model(self, model):
        other = tiny_llama(seed=1)
        patch_llama(other)
        never_called = copy.deepcopy(other)
        patch_llama()
        logits_of(model, LONG)
        unpatch_llama()
        for one in (model, other, never_called):
            assert traces(one) == traces(tiny_llama())

    def test_one_model_alone_cannot_be_unpatched(self, model):
        patch_llama()
        logits_of(model, LONG)
        with pytest.raises(ValueError, match=r"class-wide.*Call unpatch_llama\(\) without a model"):
            unpatch_llama(model)

    def test_a_model_it_cannot_serve_is_refused_when_called(self, model):
        model.config.is_causal = False
        patch_llama()
        with pytest.raises(ValueError, match="must attend causally"):
            model(LONG)
        unpatch_llama()
        model(LONG)

    def test_models_that_the_garbage_collector_no_longer_lists(self, model):
        with patch_llama():
            logits_of(model, LONG)
            gc.freeze()
        gc.unfreeze()
        assert traces(model) == traces(tiny_llama())

    def test_models_pickled_under_it_are_stock_after_it(self, model):
        stock = logits_of(model, LONG)
        with patch_llama():
            logits_of(model, LONG)
            pickled = pickle.dumps(model)
        twin = pickle.loads(pickled)
        assert torch.equal(logits_of(twin, LONG), stock)
        assert traces(twin) == traces(tiny_llama())

    def test_first_calls_from_two_threads(self):
        model, results = tiny_llama(), []
        patch_llama()
        threads = [
            threading.Thread(target=lambda: results.append(logits_of(model, LONG)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(logits, results[0]) for logits in results)
        assert len(model.model._forward_pre_hooks) == 1


def is_class_patched(model):
    with torch.no_grad():
        model(LONG)
    return type(model.model.rotary_emb).__name__ == "UnrotatedEmbedding"


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


class TestAttentionImplementation:
    def test_setting_it_keeps_the_model_patched(self, model):
        patch_llama(model, rescale_every=7)
        expected = logits_of(model, LONG)
        for name in ("eager", "sdpa", "eager"):
            model.set_attn_implementation(name)
            assert model.config._attn_implementation == name
            assert_close(logits_of(model, LONG), expected)
        unpatch_llama(model)
        assert model.config._attn_implementation == "eager"
        assert torch.equal(
            logits_of(model, LONG), logits_of(tiny_llama(attn_implementation="eager"), LONG)
        )

    @pytest.mark.parametrize("name", ["eager", "sdpa"])
    def test_reads_as_before(self, name):
        model = tiny_llama(attn_implementation=name)
        handle = patch_llama(model)
        assert model.config._attn_implementation == name
        handle.remove()
        assert {
            module.config._attn_implementation
            for module in model.modules()
            if hasattr(module, "config")
        } == {name}

    def test_the_backend_that_is_named_is_the_one_that_runs(self, model, monkeypatch):
        """Otherwise the tests of one backend could pass on another."""
        patch_llama(model)
        calls = []
        stock = nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(
            nn.functional,
            "scaled_dot_product_attention",
            lambda *a, **k: calls.append(1) or stock(*a, **k),
        )
        logits_of(model, LONG)
        assert calls
        calls.clear()
        model.set_attn_implementation("eager")
        logits_of(model, LONG)
        assert not calls

    def test_flex_attention_is_refused_by_name(self, model):
        patch_llama(model)
        model.config._attn_implementation = "flex_attention"
        with pytest.raises(
            ValueError, match=r"eager, sdpa or a flash attention, got 'flex_attention'"
        ):
            logits_of(model, LONG)
        other = tiny_llama()
        other.config._attn_implementation = "flex_attention"
        before = traces(other)
        with pytest.raises(ValueError, match=r"set_attn_implementation\(.sdpa.\)"):
            patch_llama(other)
        assert traces(other) == before


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
            patch.resolve_schedule(config, DynamicYaRNConfig())


class TestRefusedOptions:
    def test_unknown(self, model):
        with pytest.raises(TypeError, match=r"among \[.*'rescale_every'.*\], got \['rescale'\]"):
            patch_llama(model, rescale=3)

    def test_both_kinds(self, model):
        with pytest.raises(TypeError, match="got both"):
            patch_llama(model, DynamicYaRNConfig(), rescale_every=3)

    def test_not_a_config(self, model):
        with pytest.raises(TypeError, match="must be a DynamicYaRNConfig, got dict"):
            patch_llama(model, {"rescale_every": 3})

    def test_leave_an_earlier_patch_as_it_was(self, model):
        patch_llama(model, rescale_every=7)
        expected = logits_of(model, LONG)
        with pytest.raises(ValueError, match="rescale_every"):
            patch_llama(model, rescale_every=-1)
        with pytest.raises(ValueError, match="beta_fast"):
            patch_llama(model, beta_fast=0.5)
        assert torch.equal(logits_of(model, LONG), expected)


def stock_cache(model, ids):
    cache = DynamicCache()
    logits_of(model, ids, cache)
    return cache


class TestRefusedCaches:
    def test_ours_on_an_unpatched_model(self, model):
        cache = DynamicYaRNCache()
        for call in (logits_of, generate):
            with pytest.raises(TypeError, match=r"patched model.*Call patch_llama\(model\) first"):
                call(model, LONG, cache)
            assert cache.get_seq_length() == 0
        patch_llama(model)
        assert_close(logits_of(model, LONG, cache), logits_of(model, LONG))
        unpatch_llama(model)
        with pytest.raises(TypeError, match="patched model"):
            logits_of(model, LONG, cache)
        patch_llama(model)
        more = random_ids(5, seed=1)
        expected = logits_of(model, torch.cat((LONG, more), 1))[:, -5:]
        assert_close(logits_of(model, more, cache), expected)

    def test_a_filled_foreign_cache(self, model):
        cache = stock_cache(model, LONG)
        keys = cache.layers[0].keys.clone()
        patch_llama(model)
        with pytest.raises(TypeError, match="un-rotated keys, got a DynamicCache with 70 tokens"):
            logits_of(model, LONG, cache)
        assert type(cache) is DynamicCache
        assert torch.equal(cache.layers[0].keys, keys)

    def test_a_static_cache(self, model):
        patch_llama(model)
        with pytest.raises(TypeError, match="must be a DynamicYaRNCache, got a StaticCache"):
            logits_of(model, LONG, StaticCache(config=model.config, max_cache_len=99))
        with pytest.raises(TypeError, match="must be a DynamicYaRNCache, got a StaticCache"):
            generate(model, LONG, cache_implementation="static")

    @pytest.mark.filterwarnings("ignore::FutureWarning:optimum", "ignore::DeprecationWarning")
    def test_a_quantized_cache(self, model):
        patch_llama(model)
        with pytest.raises(TypeError, match="must be a DynamicYaRNCache, got a QuantizedCache"):
            logits_of(model, LONG, QuantizedCache(backend="quanto", config=model.config))
        with pytest.raises(TypeError, match="must be a DynamicYaRNCache, got a QuantizedCache"):
            generate(model, LONG, cache_implementation="quantized")

    def test_an_offloaded_cache(self, model):
        patch_llama(model)
        with pytest.raises(TypeError, match="got an offloaded DynamicCache"):
            generate(model, LONG, cache_implementation="offloaded")

    def test_something_else(self, model):
        patch_llama(model)
        with pytest.raises(TypeError, match="must be a DynamicYaRNCache, got a tuple"):
            model.model(LONG, **{CACHE: ((torch.zeros(1), torch.zeros(1)),)})

    def test_a_cache_filled_under_other_options(self, model):
        patch_llama(model, rescale_every=7)
        cache = DynamicYaRNCache()
        logits_of(model, LONG, cache)
        patch_llama(model, rescale_every=8)
        with pytest.raises(ValueError, match=r"rescale_every=7.*got.*rescale_every=8"):
            logits_of(model, LONG, cache)

    def test_a_cache_of_another_model(self, model):
        other = tiny_llama(num_hidden_layers=2)
        patch_llama(model)
        patch_llama(other)
        cache = DynamicYaRNCache()
        logits_of(other, LONG, cache)
        with pytest.raises(ValueError, match="with 2 layers, got 3"):
            logits_of(model, LONG, cache)

    def test_refusal_leaves_an_empty_cache_of_the_caller_alone(self, model):
        patch_llama(model)
        cache = DynamicCache()
        with pytest.raises(ValueError, match="attention_mask must be"):
            logits_of(model, LONG, cache, attention_mask=torch.ones(1, 3))
        assert type(cache) is DynamicCache


class TestAFailedCallLeavesTheCacheAsItWas:
    """The next correct call on the cache is right."""

    @pytest.fixture(params=[0, 50], ids=["empty", "filled"])
    def case(self, request, model):
        patch_llama(model, rescale_every=7)
        cache = DynamicYaRNCache()
        if request.param:
            logits_of(model, LONG[:, : request.param], cache)
        yield model, cache
        assert cache.get_seq_length() == request.param
        rest = logits_of(model, LONG[:, request.param :], cache)
        assert_close(rest, logits_of(model, LONG, use_cache=False)[:, request.param :])

    def test_another_batch(self, case):
        model, cache = case
        if cache.get_seq_length():
            with pytest.raises(
                ValueError, match=r"batch size of the cache, 1, got 2.*batch_repeat_interleave"
            ):
                logits_of(model, random_ids(3, rows=2), cache)

    def test_another_dtype(self, case):
        model, cache = case
        if cache.get_seq_length():
            other = copy.deepcopy(model).to(torch.bfloat16)
            with pytest.raises(ValueError, match=r"dtype.*float32.*got.*bfloat16"):
                logits_of(other, LONG[:, :3], cache)

    def test_other_heads(self, case):
        _, cache = case
        if cache.get_seq_length():
            other = tiny_llama(num_key_value_heads=4)
            patch_llama(other, rescale_every=7)
            with pytest.raises(ValueError, match=r"with 2 heads of 16 .*got 4 of 16"):
                logits_of(other, LONG[:, :3], cache)

    @pytest.mark.parametrize(
        ("kwargs", "error", "match"),
        [
            (
                {"attention_mask": torch.ones(1, 2)},
                ValueError,
                r"attention_mask must be .* got \(1, 2\)",
            ),
            ({"attention_mask": torch.ones(1, 1, 2, 2)}, ValueError, "attention_mask must be"),
            ({"attention_mask": [[1, 1, 1]]}, TypeError, "attention_mask must be a torch.Tensor"),
            (
                {"position_ids": torch.zeros(1, 2).long()},
                ValueError,
                r"position_ids must be .* got \(1, 2\)",
            ),
            ({"position_ids": torch.zeros(1, 3)}, TypeError, "position_ids must be an integer"),
            ({"position_ids": torch.tensor([[-3, -2, -1]])}, ValueError, "position_ids must"),
        ],
        ids=["short mask", "4-D mask", "list", "short ids", "float ids", "negative ids"],
    )
    def test_bad_arguments(self, case, kwargs, error, match):
        model, cache = case
        with pytest.raises(error, match=match):
            logits_of(model, LONG[:, :3], cache, **kwargs)

    def test_an_integer_4d_mask(self, case):
        model, cache = case
        mask = torch.ones(1, 1, 3, cache.get_seq_length() + 3, dtype=torch.long)
        with pytest.raises(TypeError, match=r"bool or floating point, got torch.int64"):
            logits_of(model, LONG[:, :3], cache, attention_mask=mask)

    def test_a_mask_that_shows_padding(self, case):
        model, cache = case
        if cache.get_seq_length():
            padded, ids = DynamicYaRNCache(), random_ids(50, rows=2)
            mask = torch.ones(2, 50)
            mask[0, :9] = 0
            logits_of(model, ids, padded, attention_mask=mask)
            with pytest.raises(ValueError, match="got one that shows padding"):
                logits_of(model, ids[:, :1], padded, attention_mask=torch.ones(2, 51))
            with pytest.raises(
                ValueError, match=r"got one that shows padding|go on from the tokens"
            ):
                generate(model, torch.cat((ids, ids[:, :1]), 1), padded)

    @pytest.mark.parametrize(
        "kwargs",
        [{"is_causal": False}, {"cu_seq_lens_q": torch.tensor([0, 3]).int()}],
        ids=["is_causal", "cu_seq_lens"],
    )
    def test_keywords_of_kernels(self, case, kwargs):
        model, cache = case
        with pytest.raises(ValueError, match=r"is_causal=False|told apart by position_ids"):
            logits_of(model, LONG[:, :3], cache, **kwargs)

    def test_positions_that_leave_a_gap(self, case):
        model, cache = case
        if cache.get_seq_length():
            with pytest.raises(
                ValueError, match=r"go on from the tokens in the cache, at \[50\].* got \[53\]"
            ):
                logits_of(model, LONG[:, :1], cache, position_ids=torch.tensor([[53]]))

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    @pytest.mark.parametrize("layer", [0, 1, 2])
    def test_an_error_half_way(self, case, error, layer):
        model, cache = case

        def fail(*_):
            raise error("half way")

        hook = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
        with pytest.raises(error, match="half way"):
            logits_of(model, LONG[:, :9], cache)
        hook.remove()

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_error_closes_the_cache_to_unpatched_models(self, case, error):
        """Even where somebody keeps the exception, and the failed call's frames with it."""
        model, cache = case

        def fail(*_):
            raise error("half way")

        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(error) as kept:
            logits_of(model, LONG[:, :9], cache)
        hook.remove()
        with pytest.raises(TypeError, match="patched model"):
            logits_of(tiny_llama(), LONG[:, :9], cache)
        assert kept

    @pytest.mark.parametrize("at", range(9))
    def test_an_interrupt_while_keys_are_rotated(self, case, at, monkeypatch):
        """The rotated copy must not be taken for whole."""
        model, cache = case
        monkeypatch.setattr(layers, "ROTATED_AT_A_TIME", 8)
        rotate, calls = layers.rotate, []

        def interrupted(*args, **kwargs):
            calls.append(None)
            if len(calls) == at + 1:
                raise KeyboardInterrupt
            return rotate(*args, **kwargs)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(layers, "rotate", interrupted)
            logits_of(model, random_ids(20, seed=5), cache)

    def test_operations_after_a_failure(self, case):
        model, cache = case

        def fail(*_):
            raise RuntimeError

        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError):
            logits_of(model, LONG[:, :9], cache)
        hook.remove()
        cache.reorder_cache(torch.tensor([0]))
        assert copy.deepcopy(cache).get_seq_length() == cache.get_seq_length()


class TestRefusedCalls:
    def test_a_layer_by_itself(self, model):
        patch_llama(model)
        hidden = torch.zeros(1, 3, 64)
        positions = torch.arange(3)[None]
        with pytest.raises(ValueError, match="must be called by its patched decoder"):
            model.model.layers[0](
                hidden,
                position_ids=positions,
                position_embeddings=model.model.rotary_emb(hidden, positions),
            )

    def test_forward_instead_of_call(self, model):
        patch_llama(model)
        with pytest.raises(ValueError, match=r"Call the model, not its layers or its forward\(\)"):
            model.model.forward(LONG)

    def test_both_ids_and_embeddings(self, model):
        patch_llama(model)
        with pytest.raises(ValueError, match="input_ids"):
            model(LONG, inputs_embeds=torch.zeros(1, 70, 64))
        with pytest.raises(ValueError, match="input_ids"):
            model()

    def test_no_tokens(self, model):
        patch_llama(model)
        with pytest.raises(ValueError, match="at least one token"):
            model(LONG[:, :0])

    def test_layers_cropped_behind_the_back_of_the_cache(self, model):
        patch_llama(model)
        cache = DynamicYaRNCache()
        logits_of(model, LONG, cache)
        cache.layers[1].keys = cache.layers[1].keys[:, :, :-3]
        with pytest.raises(
            ValueError, match=r"layer 1 of the cache must hold 70 tokens.*got 67.*cache.crop"
        ):
            logits_of(model, LONG, cache)


def test_window_is_respected(model):
    """The whole file rests on a window of 32 tokens."""
    assert model.config.max_position_embeddings == WINDOW
