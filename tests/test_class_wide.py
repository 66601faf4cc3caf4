"""A patch of every model, loaded already or later."""

import copy
import gc
import logging
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import (
    VOCABULARY,
    WINDOW,
    assert_close,
    generate,
    logits_of,
    random_ids,
    tiny_llama,
    traces,
)
from families import STEP, tiny
from torch import nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel

from hf_dynyarn import DynamicYaRNCache, DynamicYaRNConfig, hooks, patch_llama, unpatch_llama

LONG = random_ids(70)


def is_class_patched(model):
    with torch.no_grad():
        model(LONG)
    return type(model.model.rotary_emb).__name__ == "UnrotatedEmbedding"


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

    def test_a_call_while_another_thread_patches(self, model, monkeypatch):
        """It waits: half patched, a model would rotate twice."""
        expected = logits_of(tiny_patched(), LONG)
        patching, results, stock = threading.Event(), {}, hooks.rotary_embeddings

        def slow(decoder):
            patching.set()
            time.sleep(0.5)
            return stock(decoder)

        def call(name):
            results[name] = logits_of(model, LONG)

        patch_llama()
        monkeypatch.setattr(hooks, "rotary_embeddings", slow)
        first = threading.Thread(target=call, args=("first",))
        first.start()
        assert patching.wait(10)
        call("second")
        first.join()
        assert torch.equal(results["first"], expected)
        assert torch.equal(results["second"], expected)


def gpt2():
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, **ids)
    return GPT2LMHeadModel(config).eval()


class TestOtherModels:
    """What we do not serve runs no line of ours."""

    def test_has_nothing_of_ours(self):
        other = gpt2()
        before = {name: dict(vars(cls)) for name, cls in classes_of(other).items()}
        with patch_llama():
            other(LONG)
            after = {name: dict(vars(cls)) for name, cls in classes_of(other).items()}
        del before["PreTrainedModel"], after["PreTrainedModel"]
        assert before == after
        assert traces(other) == traces(gpt2())

    def test_is_one_graph(self):
        other = gpt2()
        stock = other(LONG, use_cache=False).logits
        with patch_llama():
            compiled = torch.compile(other, fullgraph=True, backend="eager")
            assert_close(compiled(LONG, use_cache=False).logits, stock)

    def test_is_exported(self):
        other, kwargs = gpt2(), {"use_cache": False}
        stock = other(LONG, **kwargs).logits
        with patch_llama():
            exported = torch.export.export(other, (LONG,), kwargs, strict=True)
        assert_close(exported.module()(LONG, **kwargs).logits, stock)


def classes_of(model):
    return {cls.__name__: cls for cls in type(model).__mro__ if issubclass(cls, nn.Module)}


class TestClasses:
    def test_are_given_back_what_they_had(self):
        phi3 = type(tiny("phi3"))
        found = (LlamaModel, phi3, PreTrainedModel)
        before = [dict(vars(cls)) for cls in found]
        with patch_llama():
            assert "__call__" in vars(LlamaModel)
            later = type("LlamaModel", (LlamaModel,), {"__module__": LlamaModel.__module__})
            assert "__call__" in vars(later)
        assert [dict(vars(cls)) for cls in found] == before
        assert "__call__" not in vars(later)

    def test_derived_ones_are_reached_once(self, model):
        expected = logits_of(tiny_llama(), LONG)
        model.model.__class__ = type("Derived", (LlamaModel,), {})
        with patch_llama():
            assert "__call__" not in vars(type(model.model))
            assert not torch.equal(logits_of(model, LONG), expected)
            assert len(model.model._forward_pre_hooks) == 1

    def test_a_family_that_is_imported_later(self):
        code = (
            "import sys, torch\n"
            "from hf_dynyarn import patch_llama, unpatch_llama\n"
            "patch_llama()\n"
            "assert 'transformers.models.llama.modeling_llama' not in sys.modules\n"
            "from transformers import LlamaConfig, LlamaModel\n"
            "sizes = dict(hidden_size=32, num_attention_heads=2, intermediate_size=32)\n"
            "model = LlamaModel(LlamaConfig(num_hidden_layers=1, vocab_size=9, **sizes))\n"
            "model(torch.tensor([[1]]))\n"
            "assert type(model.rotary_emb).__name__ == 'UnrotatedEmbedding'\n"
            "unpatch_llama()\n"
            "assert type(model.rotary_emb).__name__ == 'LlamaRotaryEmbedding'\n"
            "assert '__call__' not in vars(LlamaModel)\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_compiled_models(self, model):
        expected = logits_of(tiny_llama(), LONG[:, :WINDOW])
        patch_llama()
        model.forward = torch.compile(model.forward, backend="eager")
        assert_close(logits_of(model, LONG[:, :WINDOW]), expected)
        assert type(model.model.rotary_emb).__name__ == "UnrotatedEmbedding"
        cache = DynamicYaRNCache()
        parts = [logits_of(model, part, cache) for part in LONG.split([40, 29, 1], 1)]
        assert_close(torch.cat(parts, dim=1), logits_of(tiny_patched(), LONG))


def tiny_patched():
    model = tiny_llama()
    patch_llama(model)
    return model


def not_causal(model):
    model.config.is_causal = False


def own_attention(model):
    own = {"forward": lambda self, *args, **kwargs: LlamaAttention.forward(self, *args, **kwargs)}
    model.model.layers[1].self_attn.__class__ = type("Own", (LlamaAttention,), own)


def no_attention(model):
    class Nothing(nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states, None

    model.model.layers[1].self_attn = Nothing()


def rope_type(model):
    rope = getattr(model.config, "rope_parameters", None) or {}
    name = "rope_parameters" if rope else "rope_scaling"
    setattr(model.config, name, {**rope, "rope_type": "proportional"})


def gemma3_with_images():
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
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config={**sizes, "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=VOCABULARY - 1,
    )
    torch.manual_seed(0)
    return Gemma3ForConditionalGeneration(config).eval()


@pytest.fixture
def warnings_of(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [r.getMessage() for r in caplog.records if "left as it is" in r.getMessage()]


class TestLeftAlone:
    """A model that cannot be served stays stock; one warning says which, and why."""

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (not_causal, "must attend causally"),
            (own_attention, "forward() of LlamaAttention must be its own"),
            (no_attention, "one attention layer of its own in each decoder layer"),
            (rope_type, "rope type of the model must be one of"),
        ],
    )
    def test_is_stock(self, model, warnings_of, change, why):
        change(model)
        stock, before = logits_of(model, LONG), traces(model)
        patch_llama()
        for _ in range(2):
            assert torch.equal(logits_of(model, LONG), stock)
        with pytest.raises(TypeError, match="must be used with a patched model"):
            logits_of(model, LONG, DynamicYaRNCache())
        assert len(warnings_of()) == 1
        assert "a LlamaModel is left as it is: " in warnings_of()[0]
        assert why in warnings_of()[0]
        unpatch_llama()
        assert traces(model) == before

    def test_is_looked_at_again_by_the_next_patch(self, model, warnings_of):
        not_causal(model)
        with patch_llama():
            logits_of(model, LONG)
        del model.config.is_causal
        with patch_llama():
            assert is_class_patched(model)
        assert len(warnings_of()) == 1

    def test_is_one_graph_once_it_was_called(self, model):
        rope_type(model)
        stock = logits_of(model, LONG)
        patch_llama()
        logits_of(model, LONG)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_close(logits_of(compiled, LONG, use_cache=False), stock)

    @pytest.mark.parametrize("text_model_first", [False, True])
    def test_gemma_3_with_images(self, warnings_of, text_model_first):
        """Text alone too: it makes the same masks."""
        model, ids = gemma3_with_images(), random_ids(20).clamp(max=VOCABULARY - 2)
        with_image = ids.clone()
        with_image[0, 3:7] = VOCABULARY - 1  # the patches of the image
        image = {"pixel_values": torch.randn(1, 3, 16, 16)}
        types = {"token_type_ids": (with_image == VOCABULARY - 1).long()}
        stock = logits_of(model, ids), logits_of(model, with_image, **image, **types)
        before = traces(model)
        patch_llama()
        if text_model_first:
            model.get_decoder()(ids)
        for _ in range(2):
            assert torch.equal(logits_of(model, ids), stock[0])
            assert torch.equal(logits_of(model, with_image, **image, **types), stock[1])
        assert len(warnings_of()) == 1
        assert "a Gemma3Model is left as it is: " in warnings_of()[0]
        assert "attends both ways over images" in warnings_of()[0]
        unpatch_llama()
        assert traces(model) == before

    def test_other_models_are_served_beside_it(self, model, warnings_of):
        other = tiny_llama(seed=1)
        not_causal(other)
        patch_llama()
        logits_of(other, LONG)
        assert is_class_patched(model)
        assert len(warnings_of()) == 1


class TestPhi3:
    """Whose `generate` throws a cache away on the way past the window."""

    @pytest.fixture
    def expected(self):
        model = tiny("phi3-longrope")
        patch_llama(model)
        return [
            generate(model, random_ids(length), new_tokens=20)
            for length in (WINDOW - 8, WINDOW + 5)
        ]

    @pytest.mark.parametrize("index", [0, 1], ids=["past the window", "from past the window"])
    def test_keeps_the_cache(self, expected, index):
        ids = random_ids((WINDOW - 8, WINDOW + 5)[index])
        patch_llama()
        model, cache = tiny("phi3-longrope"), DynamicYaRNCache()
        assert torch.equal(generate(model, ids, cache, new_tokens=20), expected[index])
        assert cache.get_seq_length() == ids.shape[1] + 19
        assert torch.equal(generate(model, ids, new_tokens=20), expected[index])

    def test_is_stock_again(self):
        model, ids = tiny("phi3-longrope"), random_ids(WINDOW - 8)
        stock, own = generate(model, ids), type(model).prepare_inputs_for_generation
        with patch_llama():
            assert not torch.equal(generate(model, ids), stock)
        assert type(model).prepare_inputs_for_generation is own
        assert torch.equal(generate(model, ids), stock)

    def test_one_that_is_left_alone_generates_as_stock(self, warnings_of):
        model, ids = tiny("phi3-longrope"), random_ids(WINDOW - 8)
        model.model.layers[0].self_attn.is_causal = False
        stock = generate(model, ids)
        patch_llama()
        assert torch.equal(generate(model, ids), stock)
        assert len(warnings_of()) == 1

    def test_one_that_is_patched_by_itself_keeps_its_options(self):
        model, ids = tiny("phi3"), random_ids(WINDOW - 8)
        patch_llama(model, rescale_every=STEP)
        expected = generate(model, ids)
        with patch_llama(rescale_every=STEP + 1):
            assert torch.equal(generate(model, ids), expected)
        assert torch.equal(generate(model, ids), expected)
