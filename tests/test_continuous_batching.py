"""transformers' continuous batching, which pages keys that are rotated already: refused."""

import copy

import peft
import pytest
import torch
from conftest import CACHE, generate, logits_of, random_ids, tiny_llama
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.generation.continuous_batching import PagedAttentionCache

from hf_dynyarn import patch_llama, unpatch_llama

GREEDY = GenerationConfig(max_new_tokens=4, eos_token_id=-1, pad_token_id=0, do_sample=False)
REFUSAL = r"continuous batching pages them rotated.*use model\.generate\(\)"


def generate_batch(model):
    return model.generate_batch([[1, 2, 3], [4, 5]], GREEDY)


def start(model):
    return model.init_continuous_batching(GREEDY)


@pytest.mark.parametrize("entry", [generate_batch, start])
class TestRefusedAtTheCall:
    def test_of_a_patched_model(self, model, entry):
        patch_llama(model)
        before = model.config._attn_implementation
        with pytest.raises(ValueError, match=REFUSAL):
            entry(model)
        assert model.config._attn_implementation == before
        assert generate(model, random_ids(40)).shape == (1, 40)

    def test_class_wide(self, model, entry):
        with patch_llama(), pytest.raises(ValueError, match=REFUSAL):
            entry(model)

    def test_of_a_copy(self, model, entry):
        patch_llama(model)
        twin = copy.deepcopy(model)
        unpatch_llama(model)
        with pytest.raises(ValueError, match=REFUSAL):
            entry(twin)

    def test_of_a_model_around_a_patched_decoder(self, model, entry):
        patch_llama(model.model)
        with pytest.raises(ValueError, match=REFUSAL):
            entry(model)

    @pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of PEFT
    def test_through_a_wrapper(self, model, entry):
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        patch_llama(adapted)
        with pytest.raises(ValueError, match=REFUSAL):
            entry(adapted)


@pytest.mark.parametrize("class_wide", [False, True], ids=["by_itself", "class_wide"])
def test_undone(model, class_wide):
    before = dict(vars(PreTrainedModel)), dict(vars(model))
    with patch_llama(None if class_wide else model), pytest.raises(ValueError, match=REFUSAL):
        start(model)
    assert (dict(vars(PreTrainedModel)), dict(vars(model))) == before
    assert start(model) is not None


def test_a_model_that_is_not_patched_beside_one_that_is(model):
    patch_llama(tiny_llama())
    assert start(model) is not None


def test_class_wide_leaves_other_models_alone():
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
    with patch_llama():
        assert start(other) is not None


def test_one_that_was_started_before(model):
    """Its thread calls the model: the error at least is true."""
    patch_llama(model)
    pages = object.__new__(PagedAttentionCache)
    for name in {CACHE, "cache"}:
        with pytest.raises(ValueError, match=REFUSAL):
            model.model(random_ids(3), is_causal=False, **{name: pages})
    assert torch.isfinite(logits_of(model, random_ids(40))).all()


def test_a_model_that_the_class_wide_patch_leaves_alone(model):
    model.model.layers[0].self_attn.is_causal = False  # it cannot be served
    with patch_llama():
        logits_of(model, random_ids(8))
        assert start(model) is not None
