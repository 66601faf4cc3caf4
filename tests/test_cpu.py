"""The kernel for CPUs: the keys in parts, merged by log-sum-exp."""

import pytest
import torch
from conftest import assert_close, logits_of, random_ids, tiny_llama
from families import tiny
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_dynyarn import DynamicYaRNCache, patch_llama
from hf_dynyarn.backends import cpu, sdpa

# Largest difference from the float64 result, of numbers of about 1.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 5e-6, torch.bfloat16: 2e-2}


class TestCpuKernel:
    """The keys in parts, merged by log-sum-exp."""

    @pytest.fixture(autouse=True)
    def short_pieces(self, monkeypatch):
        monkeypatch.setattr(cpu, "LEAST_KEYS", 3)

    @pytest.fixture
    def parts(self, monkeypatch):
        """How many keys each call of the kernel saw, and in how many pieces."""
        seen, kernel = [], cpu._kernel

        def recording(query, key, value, **kwargs):
            seen.append((key.shape[2], 1 if kwargs.get("is_causal") else key.shape[1]))
            return kernel(query, key, value, **kwargs)

        monkeypatch.setattr(cpu, "_kernel", recording)
        return seen

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)], ids=str)
    @pytest.mark.parametrize("queries", [1, 2, 5, 33])
    @pytest.mark.parametrize("pieces", [1, 2, 3, 4])
    def test_gives_what_one_kernel_gives(self, pieces, queries, heads, dtype, monkeypatch, parts):
        monkeypatch.setattr(cpu, "_pieces", lambda query, keys: pieces)
        before = 4 * 9 + 3  # a remainder for 2 and 4
        keys = before if queries == 1 else before + queries
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, heads[0], queries, 8), (2, heads[1], keys, 8), (2, heads[1], keys, 8)]
        states = [torch.randn(shape, generator=generator).to(dtype) * 1.5 for shape in shapes]
        causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(one.double() for one in states), attn_mask=causal, scale=0.5, enable_gqa=True
        )
        actual = cpu.attend_in_parts(0.5, *states)
        assert actual.dtype == dtype
        assert_close(actual, expected.transpose(1, 2), TOLERANCE[dtype])
        assert sum(length * pieces for length, pieces in parts) == keys

    @pytest.mark.parametrize("kernel", [True, False], ids=["on a CPU", "elsewhere"])
    @pytest.mark.parametrize("heads", [(6, 2), (3, 3)], ids=str)
    @pytest.mark.parametrize("queries", [2, 33, 40])
    def test_without_a_plan(self, queries, heads, kernel, monkeypatch):
        if not kernel:
            monkeypatch.setattr(cpu, "_kernel", None)
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, heads[0], queries, 8), (1, heads[1], 40, 8), (1, heads[1], 40, 8)]
        states = [torch.randn(shape, generator=generator) * 1.5 for shape in shapes]
        causal = torch.ones(queries, 40, dtype=torch.bool).tril(40 - queries)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(one.double() for one in states), attn_mask=causal, scale=0.5, enable_gqa=True
        )
        actual = sdpa.attend_to_last(0.5, *states)
        assert_close(actual, expected.transpose(1, 2), TOLERANCE[torch.float32])

    @pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 4}], ids=["grouped", "not"])
    @pytest.mark.parametrize("rows", [1, 2])
    def test_any_cut_of_a_text_is_the_same(self, rows, options, monkeypatch, parts):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
        model = tiny_llama(**options).double()
        patch_llama(model, rescale_every=7)
        ids, cache = random_ids(75, rows=rows), DynamicYaRNCache()
        with sdpa_kernel(SDPBackend.MATH):
            expected = logits_of(model, ids)
        assert parts == []
        cut = ids.split([30, 21, 5, 1, 1, 1, 15, 1], 1)
        actual = torch.cat([logits_of(model, chunk, cache) for chunk in cut], 1)
        assert max(pieces for _, pieces in parts) > 1
        assert_close(actual, expected, 1e-12)
        assert_close(logits_of(model, ids), expected, 1e-12)

    def test_nothing_is_seen_beyond_a_window(self, parts):
        model = tiny("mistral-window past the trained one").double()
        patch_llama(model, rescale_every=7)
        ids, cache = random_ids(75), DynamicYaRNCache()
        with sdpa_kernel(SDPBackend.MATH):
            expected = logits_of(model, ids)
        actual = torch.cat([logits_of(model, chunk, cache) for chunk in ids.split(19, 1)], 1)
        assert parts, "up to the window"
        assert_close(actual, expected, 1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("past", [40, 0], ids=["later call", "first call"])
    def test_leaves_no_mask_to_build(self, past, dtype, masks_built, parts):
        model = tiny_llama().to(dtype)
        patch_llama(model, rescale_every=7)
        cache = DynamicYaRNCache()
        if past:
            logits_of(model, random_ids(past), cache)
        logits_of(model, random_ids(50), cache)
        assert parts
        assert masks_built == []

    @pytest.mark.parametrize(
        "reason", [None, "dropout", "gradient", "padding", "eager", "no kernel", "switched off"]
    )
    def test_is_not_used_where_it_would_be_wrong(self, reason, monkeypatch, parts):
        changes = {"attention_dropout": 0.5} if reason == "dropout" else {}
        backend = "eager" if reason == "eager" else "sdpa"
        model = tiny_llama(attn_implementation=backend, **changes)
        model.train(reason == "dropout")
        patch_llama(model, rescale_every=7)
        if reason == "no kernel":
            monkeypatch.setattr(cpu, "_kernel", None)
        mask = torch.ones(1, 50)
        mask[:, 0] = reason != "padding"
        enabled = [SDPBackend.MATH] + [SDPBackend.FLASH_ATTENTION] * (reason != "switched off")
        with torch.set_grad_enabled(reason == "gradient"), sdpa_kernel(enabled):
            model(random_ids(50), attention_mask=mask, use_cache=False)
        assert bool(parts) == (reason is None)

    @pytest.mark.parametrize(("tasks", "pieces"), [(1, 8), (3, 8), (4, 2), (6, 4), (8, 1), (33, 1)])
    def test_every_thread_has_a_share(self, tasks, pieces, monkeypatch):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
        assert cpu._pieces(torch.empty(tasks, 1, 32, 8), 1000) == pieces
        assert cpu._pieces(torch.empty(1, tasks, 1, 8), 7) == min(pieces, 2)
