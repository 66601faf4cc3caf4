"""Every way in which people generate."""

import copy
import threading

import oracle
import pytest
import torch
from conftest import (
    WINDOW,
    assert_close,
    generate,
    greedy_by_oracle,
    in_chunks,
    logits_of,
    random_ids,
)
from transformers import TextStreamer

from hf_dynyarn import DynamicYaRNCache, patch_llama


def count_calls(model):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(None))
    return calls


class TestDecoding:
    """Whatever the decoding, a cache changes nothing."""

    def test_greedy(self, model, new_cache):
        prompt = random_ids(20)
        patch_llama(model, rescale_every=7)
        expected = generate(model, prompt, use_cache=False)
        cache = new_cache()
        assert torch.equal(generate(model, prompt, cache), expected)
        assert torch.equal(generate(model, prompt), expected)
        assert cache.get_seq_length() == 59
        assert cache.scales == [oracle.scale_at(58, WINDOW, 7)]

    def test_sampling(self, model):
        prompt = random_ids(20)
        patch_llama(model)
        drawn = []
        for kwargs in ({"use_cache": False}, {"cache": DynamicYaRNCache()}):
            torch.manual_seed(3)
            drawn.append(generate(model, prompt, do_sample=True, top_k=20, **kwargs))
        assert torch.equal(*drawn)
        assert not torch.equal(drawn[0], generate(model, prompt))

    def test_beam_search(self, model, new_cache):
        prompt = random_ids(25, rows=2)
        patch_llama(model)
        beams = {"num_beams": 4, "num_return_sequences": 3}
        expected = generate(model, prompt, use_cache=False, **beams)
        assert expected.shape == (6, 40)
        assert torch.equal(generate(model, prompt, new_cache(), **beams), expected)

    def test_several_samples_of_one_prompt(self, model):
        prompt = random_ids(25)
        patch_llama(model)
        drawn = []
        for kwargs in ({"use_cache": False}, {"cache": DynamicYaRNCache()}):
            torch.manual_seed(3)
            drawn.append(generate(model, prompt, do_sample=True, num_return_sequences=3, **kwargs))
        assert torch.equal(*drawn)

    def test_prompt_lookup(self, model):
        prompt = random_ids(9).repeat(1, 3)
        patch_llama(model)
        expected = generate(model, prompt)
        calls = count_calls(model)
        assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=4), expected)
        assert len(calls) < 40, "no candidate was ever taken, so nothing was tested"

    @pytest.mark.parametrize("assistant_is_patched", [True, False])
    def test_assistant_model(self, model, assistant_is_patched):
        assistant = copy.deepcopy(model)
        with torch.no_grad():
            for (
                weight
            ) in assistant.parameters():  # a model that is often, not always, of the same mind
                weight.add_(torch.randn_like(weight) * 0.003)
        prompt = random_ids(25)
        patch_llama(model)
        if assistant_is_patched:
            patch_llama(assistant)
        expected = generate(model, prompt)
        calls = count_calls(model)
        assert torch.equal(generate(model, prompt, assistant_model=assistant), expected)
        assert 1 < len(calls) < 40

    def test_no_cache_at_all(self, model):
        prompt = random_ids(25)
        expected = greedy_by_oracle(model, prompt[0], 15, 1)
        patch_llama(model)
        assert torch.equal(generate(model, prompt, use_cache=False, new_tokens=15)[0], expected)

    def test_inputs_embeds(self, model):
        prompt = random_ids(40)
        patch_llama(model)
        expected = generate(model, prompt)
        embeds = model.get_input_embeddings()(prompt)
        assert torch.equal(generate(model, None, inputs_embeds=embeds), expected)
        whole = logits_of(model, prompt)
        assert torch.equal(logits_of(model, None, inputs_embeds=embeds), whole)

    def test_continuing_from_a_filled_cache(self, model):
        prompt, more = random_ids(40), random_ids(12, seed=1)
        patch_llama(model, rescale_every=7)
        cache = DynamicYaRNCache()
        reply = generate(model, prompt, cache, 10)
        turn = torch.cat((prompt, reply, more), 1)
        expected = generate(model, turn, use_cache=False)
        assert torch.equal(generate(model, turn, cache), expected)

    def test_continuing_from_a_prefilled_cache(self, model):
        prompt = random_ids(60)
        patch_llama(model)
        cache = DynamicYaRNCache()
        in_chunks(model, prompt[:, :-1], 13, cache)
        expected = generate(model, prompt, use_cache=False)
        assert torch.equal(generate(model, prompt, cache), expected)


class TestSeveralAtOnce:
    def test_two_caches_interleaved(self, model):
        patch_llama(model)
        texts = [random_ids(90, seed=1), random_ids(90, seed=2)]
        caches, logits = [DynamicYaRNCache(), DynamicYaRNCache()], [[], []]
        for start in range(0, 90, 9):
            for text, cache, out in zip(texts, caches, logits, strict=True):
                out.append(logits_of(model, text[:, start : start + 9], cache))
        for text, out in zip(texts, logits, strict=True):
            assert_close(torch.cat(out, 1), logits_of(model, text, use_cache=False))

    def test_two_threads(self, model):
        patch_llama(model)
        prompts = [random_ids(length, seed=length) for length in (10, 60)]
        expected = [generate(model, prompt, use_cache=False) for prompt in prompts]
        found = {}

        def run(index):
            found[index] = [generate(model, prompts[index], DynamicYaRNCache()) for _ in range(4)]

        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(2):
            assert all(torch.equal(tokens, expected[index]) for tokens in found[index])


class TestTools:
    def test_text_streamer(self, model, tokenizer, capsys):
        patch_llama(model)
        prompt = random_ids(25)
        tokens = generate(model, prompt, streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert capsys.readouterr().out.split() == tokenizer.decode(tokens[0]).split()
