"""The plan: how a call is cut, what is masked, and what it costs."""

import pytest
import torch
from conftest import assert_close, left_padded, logits_of, random_ids, tiny_llama
from families import tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dynyarn import DynamicYaRNCache, patch_llama, workspace
from hf_dynyarn.backends import cpu, sdpa
from hf_dynyarn.masks import Masks
from hf_dynyarn.plan import make_plan
from hf_dynyarn.schedules import YaRNSchedule

SCHEDULE = YaRNSchedule(
    rotary_dim=16, rope_theta=1e4, original_max_position_embeddings=32, rescale_every=8
)


def plan_for(length, cache=None, mask=None, position_ids=None, backend="sdpa", rows=1):
    ids = torch.zeros(rows, length, dtype=torch.long)
    return make_plan(SCHEDULE, cache, ids, mask, position_ids, backend, False)


def held(positions, packed=False):
    cache = DynamicYaRNCache()
    cache.commit(torch.tensor(positions), SCHEDULE, packed)
    return cache


def columns(plan):
    return [(segment.start, segment.stop) for segment in plan.segments]


class TestSegments:
    def test_cut_where_the_scale_changes(self):
        assert columns(plan_for(50)) == [(0, 32), (32, 40), (40, 48), (48, 50)]

    def test_continue_where_the_cache_ends(self):
        assert columns(plan_for(20, held([list(range(35))]))) == [(0, 5), (5, 13), (13, 20)]

    def test_one_for_a_step(self):
        assert columns(plan_for(1, held([list(range(40))]))) == [(0, 1)]

    def test_cut_where_any_row_changes(self):
        _, mask = left_padded([torch.zeros(40), torch.zeros(35)])
        assert columns(plan_for(40, mask=mask, rows=2)) == [(0, 32), (32, 37), (37, 40)]

    def test_padding_cuts_nothing(self):
        mask = torch.ones(1, 60, dtype=torch.long)
        mask[0, 35:45] = 0
        cache = held([[*range(35)]])
        assert columns(plan_for(25, cache, mask=mask)) == [(0, 15), (15, 23), (23, 25)]

    def test_cut_where_a_document_starts_and_see_nothing_before(self):
        positions = torch.tensor([[*range(34), *range(6)]])
        plan = plan_for(40, position_ids=positions)
        assert columns(plan) == [(0, 32), (32, 34), (34, 40)]
        assert [segment.first for segment in plan.segments] == [0, 0, 34]

    def test_of_one_length_for_the_whole_call_under_the_papers_rule(self):
        schedule = YaRNSchedule(16, 1e4, 32, 8, per_forward=True)
        ids = torch.zeros(1, 50, dtype=torch.long)
        plan = make_plan(schedule, None, ids, None, None, "sdpa", False)
        assert columns(plan) == [(0, 50)]


class TestPositions:
    def test_count_on_from_the_cache(self):
        assert plan_for(3, held([[0, 1, 2, 3]])).workspace.positions[:, 4:].tolist() == [[4, 5, 6]]

    def test_count_what_the_mask_shows(self):
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        assert plan_for(5, mask=mask, rows=2).workspace.positions.tolist() == [
            [-1, -1, 0, 1, 2],
            [0, 1, 2, 3, 4],
        ]

    def test_remember_padding_without_a_mask(self):
        plan = plan_for(2, held([[-1, -1, 0, 1], [0, 1, 2, -1]]), rows=2)
        assert plan.workspace.positions[:, 4:].tolist() == [[2, 3], [3, 4]]
        assert plan.masks.visible.tolist() == [
            [False, False, True, True, True, True],
            [True, True, True, False, True, True],
        ]

    def test_are_the_callers_where_given(self):
        assert (
            plan_for(3, position_ids=torch.tensor([[7, 8, 9]]), rows=2).workspace.positions.tolist()
            == [[7, 8, 9]] * 2
        )

    def test_any_integer_type_will_do(self):
        positions = torch.tensor([[4, 5, 6]], dtype=torch.int32)
        assert plan_for(
            3, held([[0, 1, 2, 3]]), position_ids=positions
        ).workspace.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6]]


class TestMasks:
    @pytest.mark.parametrize("past", [0, 40])
    @pytest.mark.parametrize("padded", [True, False])
    def test_say_who_sees_whom(self, past, padded):
        """Rebuilt here key by key."""
        mask = torch.ones(2, past + 9, dtype=torch.long)
        if padded:
            mask[0, :3] = 0
        cache = held([list(range(past))] * 2) if past else None
        plan = plan_for(9, cache, mask=mask, rows=2)
        got = plan.masks.of(2, 7, 0, torch.zeros(1)).expand(2, 1, 5, past + 7)
        for row in range(2):
            for query in range(5):
                for key in range(past + 7):
                    own = past + 2 + query
                    sees = key == own or (key < own and bool(mask[row, key]))
                    assert got[row, 0, query, key].item() == sees

    def test_none_for_a_step_or_a_first_call(self, masks_built):
        model = tiny_llama()
        patch_llama(model)
        cache = DynamicYaRNCache()
        logits_of(model, random_ids(32), cache)
        for _ in range(5):
            logits_of(
                model,
                random_ids(1),
                cache,
                attention_mask=torch.ones(1, cache.get_seq_length() + 1),
            )
        assert masks_built == []

    def test_none_for_packed_documents_of_one_row(self, masks_built):
        model = tiny_llama()
        patch_llama(model)
        positions = torch.tensor([[*range(30), *range(20), *range(32)]])
        logits_of(model, random_ids(82), position_ids=positions)
        assert masks_built == []

    def test_never_for_the_whole_call(self, masks_built, monkeypatch):
        monkeypatch.setattr(sdpa, "TILE", 16)
        model = tiny_llama()
        ids = random_ids(200)
        patch_llama(model, rescale_every=64)
        cache = DynamicYaRNCache()
        logits = [logits_of(model, ids[:, :3], cache), logits_of(model, ids[:, 3:], cache)]
        assert max(shape[2] for shape in masks_built) == 16
        assert_close(torch.cat(logits, 1), logits_of(model, ids, use_cache=False))

    def test_no_stock_mask_is_built(self, monkeypatch):
        """At 32k tokens that alone would take a gigabyte."""
        from transformers import masking_utils

        def refuse(*args, **kwargs):
            raise AssertionError("a stock mask was built")

        for name in ("sdpa", "eager"):
            monkeypatch.setitem(
                masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, refuse
            )
        model = tiny_llama()
        patch_llama(model)
        cache = DynamicYaRNCache()
        ids, mask = left_padded([random_ids(9)[0], random_ids(40)[0]])
        logits_of(model, ids, cache, attention_mask=mask)
        logits_of(model, random_ids(4, rows=2), cache)


@pytest.fixture
def masks_built(monkeypatch):
    """Shapes of the masks that were built."""
    shapes = []

    def recording(build):
        def recorded(self, *args):
            mask = build(self, *args)
            shapes.append(tuple(mask.shape))
            return mask

        return recorded

    for name in ("of", "tail"):
        monkeypatch.setattr(Masks, name, recording(getattr(Masks, name)))
    return shapes


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
