"""A cache of fixed size: the contract, its operations, its graphs, its refusals."""

import copy
import pickle
from threading import Thread

import pytest
import torch
from conftest import (
    assert_close,
    generate,
    in_chunks,
    left_padded,
    logits_of,
    random_ids,
    tiny_llama,
)
from families import CASES, STEP, tiny
from oracle import CACHE
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig, StaticCache

from hf_dynyarn import DynamicYaRNCache, patch_llama, unpatch_llama
from hf_dynyarn.static import StaticYaRNCache
from hf_dynyarn.versions import TRANSFORMERS

TEXT = random_ids(90)
ROOM = 128

OPERATIONS = {
    "crop": lambda cache: cache.crop(-7) if TRANSFORMERS > (5, 17) else cache.crop(43),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "to": lambda cache: cache.to("cpu"),
}


def static(room=ROOM):
    return DynamicYaRNCache(max_cache_len=room)


@pytest.fixture
def model():
    model = tiny_llama()
    patch_llama(model, rescale_every=STEP)
    return model


class TestContract:
    @pytest.mark.parametrize("sizes", [[90], [1] * 90, [40, 17, 16, 1, 16], [3, 7, 80]], ids=str)
    def test_any_cut_is_the_same(self, model, sizes):
        expected = logits_of(model, TEXT, use_cache=False)
        assert_close(in_chunks(model, TEXT, sizes, static()), expected)

    @pytest.mark.parametrize("case", [case for case in CASES if "gpt_oss" not in case])
    def test_families(self, case):
        model, text = tiny(case), random_ids(50)
        patch_llama(model, rescale_every=STEP)
        expected = logits_of(model, text, use_cache=False)
        assert_close(in_chunks(model, text, [30, 1, 1, 9, 9], static()), expected)

    @pytest.mark.parametrize("change", ["float64", "heads of 320 numbers"])
    def test_what_the_kernel_lacks(self, change):
        model = tiny_llama(head_dim=320) if "320" in change else tiny_llama().double()
        patch_llama(model, rescale_every=STEP)
        expected = logits_of(model, TEXT, use_cache=False)
        assert_close(in_chunks(model, TEXT, [40, 1, 9, 40], static()), expected)

    def test_keys_and_values_of_two_dtypes(self):
        """As autocast has them where keys are normed."""
        model = tiny("qwen3")
        patch_llama(model, rescale_every=STEP)
        with torch.autocast("cpu", torch.bfloat16):
            growing, fixed = (
                in_chunks(model, TEXT, [40, 1, 9, 40], cache)
                for cache in (DynamicYaRNCache(rotated_copy=False), static())
            )
        assert_close(fixed, growing)

    @pytest.mark.parametrize("second", ["left", "right"])
    def test_every_row_is_its_solo_run(self, model, second):
        """With padding before a turn of few tokens, behind it, and before the first one."""
        rows = [random_ids(40)[0], random_ids(25, seed=1)[0]]
        turns = [random_ids(5, seed=2)[0], random_ids(3, seed=3)[0]]
        ids, mask = left_padded(rows)
        more, more_mask = left_padded(turns)
        if second == "right":
            more[1], more_mask[1] = more[1].roll(-2), more_mask[1].roll(-2)
        cache = static()
        logits_of(model, ids, cache, attention_mask=mask)
        both = torch.cat((mask, more_mask), dim=1)
        logits = logits_of(model, more, cache, attention_mask=both)
        for row in range(2):
            solo = torch.cat((rows[row], turns[row]))[None]
            expected = logits_of(model, solo, use_cache=False)[0, -len(turns[row]) :]
            assert_close(logits[row][more_mask[row] > 0], expected)

    def test_a_window_counts_the_tokens_of_a_row(self):
        model = tiny("mistral-window")
        patch_llama(model, rescale_every=STEP)
        rows = [random_ids(40)[0], random_ids(25, seed=1)[0]]
        ids, mask = left_padded(rows)
        cache, more = static(), random_ids(9, rows=2, seed=4)
        logits_of(model, ids, cache, attention_mask=mask)
        logits = torch.cat([logits_of(model, token, cache) for token in more.split(3, 1)], dim=1)
        for row in range(2):
            solo = torch.cat((rows[row], more[row]))[None]
            assert_close(logits[row], logits_of(model, solo, use_cache=False)[0, -9:])

    def test_keys_are_unrotated_and_by_position(self, model):
        growing, fixed = DynamicYaRNCache(), static()
        for cache in (growing, fixed):
            in_chunks(model, TEXT, [60, 30], cache)
        for ours, theirs in zip(fixed.layers, growing.layers, strict=True):
            assert torch.equal(ours.keys[:, :, :60], theirs.keys[:, :, :60])
        assert fixed.scales == growing.scales
        assert fixed.positions.equal(growing.positions)

    def test_takes_the_room_of_a_stock_one(self):
        """But for the positions, which all layers share, and a slot in each."""
        model = tiny_llama(num_hidden_layers=8)
        patch_llama(model)
        fixed, stock = static(1024), StaticCache(config=model.config, max_cache_len=1024)
        logits_of(model, TEXT, fixed)
        unpatch_llama(model)
        logits_of(model, TEXT, stock)

        def size(tensors):
            return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

        held = size(fixed.buffers().values())
        assert held <= 1.01 * size(part for one in stock.layers for part in (one.keys, one.values))


class TestGenerate:
    IDS, MASK = left_padded([random_ids(50)[0], random_ids(21, seed=3)[0]])
    MODES = (
        {},
        {"num_beams": 3},
        {"prefill_chunk_size": 20},
        {"do_sample": True, "num_return_sequences": 2},
    )

    @pytest.mark.parametrize("options", MODES, ids=str)
    @pytest.mark.parametrize("asked", [True, False], ids=["by name", "by cache"])
    def test_gives_the_tokens_of_a_growing_cache(self, model, options, asked):
        if TRANSFORMERS == (5, 0) and "prefill_chunk_size" in options:
            pytest.skip("generate() itself finds no cache, as of stock models")
        # Older generate() counts the padding of chunks as positions, for stock too.
        rows = 1 if "prefill_chunk_size" in options else 2
        ids = self.IDS[:rows]
        options = {"attention_mask": self.MASK[:rows], "new_tokens": 20, **options}
        torch.manual_seed(0)
        expected = generate(model, ids, **options)
        cache = None if asked else static()
        more = {"cache_implementation": "static"} if asked else {}
        torch.manual_seed(0)
        assert generate(model, ids, cache, **more, **options).equal(expected)

    @pytest.mark.skipif(TRANSFORMERS < (5, 24), reason="refused by older generate() for stock too")
    @pytest.mark.parametrize("how", ["lookup", "assistant"])
    def test_speculation(self, model, how):
        options = {"prompt_lookup_num_tokens": 4}
        if how == "assistant":
            assistant = tiny_llama(seed=1)
            patch_llama(assistant)
            options = {"assistant_model": assistant}
        ids = random_ids(5).repeat(1, 8)
        expected = generate(model, ids, new_tokens=30)
        assert generate(model, ids, static(), new_tokens=30, **options).equal(expected)

    def test_a_stock_static_cache_becomes_ours(self, model):
        cache = StaticCache(config=model.config, max_cache_len=ROOM)
        expected = generate(model, TEXT)[:, :20]
        assert generate(model, TEXT, cache, new_tokens=20).equal(expected)
        assert type(cache) is StaticYaRNCache
        assert cache.max_cache_len == ROOM

    def test_goes_on_with_a_cache(self, model):
        cache = static()
        first = generate(model, TEXT[:, :40], cache, new_tokens=10)
        text = torch.cat((TEXT[:, :40], first, random_ids(20, seed=7)), dim=1)
        expected = generate(model, text, new_tokens=10)
        assert generate(model, text, cache, new_tokens=10).equal(expected)

    def test_class_wide_and_stock_again(self):
        model = tiny_llama()
        stock = generate(model, TEXT[:, :12], new_tokens=8, cache_implementation="static")
        with patch_llama(rescale_every=STEP):
            expected = generate(model, self.IDS, attention_mask=self.MASK, new_tokens=9)
            options = {"attention_mask": self.MASK, "new_tokens": 9}
            fixed = generate(model, self.IDS, cache_implementation="static", **options)
            assert fixed.equal(expected)
        again = generate(model, TEXT[:, :12], new_tokens=8, cache_implementation="static")
        assert again.equal(stock)

    def test_compiles_by_itself(self, model):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        options = {"attention_mask": self.MASK, "new_tokens": 12}
        expected = generate(model, self.IDS, **options)
        config = CompileConfig(mode="default", backend="eager")
        config._compile_all_devices = True
        options |= {"cache_implementation": "static", "compile_config": config}
        for _ in range(2):
            assert generate(model, self.IDS, **options).equal(expected)
        assert not torch._dynamo.utils.counters["graph_break"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class TestOperations:
    @pytest.fixture(params=[0, 9])
    def filled(self, model, request):
        """Pairs of a growing cache and a fixed one, of two rows of unequal padding."""
        ids, mask = left_padded([random_ids(50)[0], random_ids(50 - request.param, seed=3)[0]])
        caches = DynamicYaRNCache(), static()
        for cache in caches:
            logits_of(model, ids, cache, attention_mask=mask)
        return caches

    def assert_go_on_alike(self, model, caches):
        rows = len(caches[0].positions)
        more = random_ids(24, rows=rows, seed=5)
        growing, fixed = (in_chunks(model, more, [20, 1, 3], cache) for cache in caches)
        assert_close(fixed, growing)

    @pytest.mark.parametrize("name", OPERATIONS)
    def test_are_those_of_a_growing_cache(self, model, filled, name):
        for cache in filled:
            OPERATIONS[name](cache)
        assert filled[0].positions.equal(filled[1].positions)
        self.assert_go_on_alike(model, filled)

    def test_reset_keeps_the_buffers(self, model):
        cache = static()
        logits_of(model, TEXT, cache)
        buffer = cache.layers[0]._keys
        cache.reset()
        assert cache.get_seq_length() == 0
        expected = logits_of(model, TEXT[:, 5:40], use_cache=False)
        assert_close(in_chunks(model, TEXT[:, 5:40], [20, 15], cache), expected)
        assert cache.layers[0]._keys is buffer

    def test_what_is_left_of_a_text_does_not_matter(self, model):
        cache = static()
        logits_of(model, random_ids(60, rows=2), cache)
        for layer in cache.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.inf)
        cache.reset()
        ids, mask = left_padded([random_ids(50)[0], random_ids(21, seed=1)[0]])
        caches = DynamicYaRNCache(), cache
        for each in caches:
            logits_of(model, ids, each, attention_mask=mask)
        self.assert_go_on_alike(model, caches)

    @pytest.mark.parametrize("tokens", [5, 30])
    @pytest.mark.parametrize(
        "change",
        [{"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {"num_key_value_heads": 4}],
        ids=str,
    )
    def test_reset_is_for_any_model(self, model, change, tokens):
        cache = static()
        logits_of(model, TEXT, cache)
        cache.reset()
        other = tiny_llama(**change)
        patch_llama(other, rescale_every=STEP + 1)
        expected = logits_of(other, TEXT, use_cache=False)
        assert_close(in_chunks(other, TEXT, [tokens, 1, 89 - tokens], cache), expected)

    def test_reset_is_for_any_dtype(self, model):
        cache = static()
        logits_of(model, TEXT, cache)
        cache.reset()
        logits_of(model.bfloat16(), TEXT, cache)
        assert cache.layers[0].keys.dtype == torch.bfloat16

    @pytest.mark.parametrize("tokens", [5, 30])
    def test_a_failed_call_leaves_a_reset_cache_empty(self, model, tokens, monkeypatch):
        def fails(*args, **kwargs):
            raise RuntimeError("in the middle")

        cache = static()
        logits_of(model, TEXT, cache)
        cache.reset()
        with monkeypatch.context() as broken:
            broken.setattr(model.model.layers[0].mlp, "forward", fails)
            with pytest.raises(RuntimeError, match="in the middle"):
                logits_of(model, random_ids(30, rows=2), cache)
        ids = random_ids(tokens, rows=2)
        assert_close(logits_of(model, ids, cache), logits_of(model, ids, use_cache=False))

    def test_of_a_model_without_its_first_layer(self, model):
        unpatch_llama(model)
        del model.model.layers[0]
        patch_llama(model, rescale_every=STEP)
        caches = DynamicYaRNCache(), static()
        for cache in caches:
            logits_of(model, random_ids(40, rows=2), cache)
            cache.to("cpu")
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.batch_select_indices(torch.tensor([1]))
            with pytest.raises(ValueError, match="got none for layer 0"):
                cache.state_dict()
        self.assert_go_on_alike(model, caches)

    @pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy], ids=["deep", "shallow"])
    def test_copies_are_apart(self, model, filled, copied):
        twin = copied(filled[1])
        logits_of(model, random_ids(3, rows=2), twin)
        self.assert_go_on_alike(model, filled)

    @pytest.mark.parametrize(
        "made",
        [
            copy.deepcopy,
            lambda cache: pickle.loads(pickle.dumps(cache)),
            lambda cache: DynamicYaRNCache.from_state_dict(cache.state_dict()),
        ],
        ids=["copied", "pickled", "loaded"],
    )
    def test_made_in_inference_mode(self, model, filled, made):
        """Buffers of inference mode could not be written to outside it."""
        with torch.inference_mode():
            twin = made(filled[1])
        self.assert_go_on_alike(model, (filled[0], twin))

    def test_saved_and_loaded(self, model, filled, tmp_path):
        filled[1].save(tmp_path / "cache.safetensors")
        loaded = DynamicYaRNCache.load(tmp_path / "cache.safetensors")
        assert type(loaded) is StaticYaRNCache
        assert loaded.max_cache_len == ROOM
        self.assert_go_on_alike(model, (filled[0], loaded))

    def test_a_failed_step_leaves_the_cache_as_it_was(self, model, filled, monkeypatch):
        def fails(*args, **kwargs):
            raise RuntimeError("in the middle")

        with monkeypatch.context() as broken:
            broken.setattr(model.model.layers[1].mlp, "forward", fails)
            with pytest.raises(RuntimeError, match="in the middle"):
                logits_of(model, random_ids(2, rows=2), filled[1])
        self.assert_go_on_alike(model, filled)


class TestGraphs:
    def test_one_for_all_steps(self, model):
        """64 steps over many scales, unequal padding, other padding, a second cache."""
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for short in (25, 38):
            ids, mask = left_padded([random_ids(40)[0], random_ids(short, seed=1)[0]])
            growing, fixed = DynamicYaRNCache(), static()
            for cache in (growing, fixed):
                logits_of(model, ids, cache, attention_mask=mask)
            for token in random_ids(64, rows=2, seed=2).split(1, 1):
                expected = logits_of(model, token, growing)
                assert_close(logits_of(compiled, token, fixed), expected)
        assert counter.frame_count == 1

    @pytest.mark.parametrize("made", ["copied", "loaded", "in inference mode"])
    def test_the_same_for_a_cache_made_otherwise(self, model, made):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        caches = [static(), static()]
        logits_of(model, TEXT[:, :40], caches[0])
        if made == "copied":
            caches[1] = copy.deepcopy(caches[0])
        elif made == "loaded":
            caches[1] = DynamicYaRNCache.from_state_dict(caches[0].state_dict())
            logits_of(model, TEXT[:, 40:60], caches[1])
        else:
            with torch.inference_mode():
                model(TEXT[:, :40], **{CACHE: caches[1]})
        for cache in caches:
            for token in TEXT[:, 60:63].split(1, 1):
                logits_of(compiled, token, cache)
        assert counter.frame_count == 1

    def test_what_does_not_fit_stops_a_step_before_it_writes(self, model):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        cache = static(42)
        logits_of(model, TEXT[:, :40], cache)
        logits_of(compiled, TEXT[:, 40:41], cache)
        logits_of(compiled, TEXT[:, 41:42], cache)
        before = cache.layers[0].keys.clone()
        with pytest.raises(RuntimeError, match="must fit into the max_cache_len"):
            logits_of(compiled, TEXT[:, 42:43], cache)
        assert cache.layers[0].keys.equal(before)
        assert cache.get_seq_length() == 42

    def test_a_step_is_exported(self, model):
        class Step(torch.nn.Module):
            def __init__(self, cache):
                super().__init__()
                self.model, self.cache = model, cache
                for name, buffer in cache.buffers().items():
                    self.register_buffer(name, buffer)

            def forward(self, ids):
                return self.model(ids, **{CACHE: self.cache}).logits

        growing, fixed = DynamicYaRNCache(), static()
        for cache in (growing, fixed):
            logits_of(model, TEXT[:, :30], cache)
        with torch.no_grad():
            exported = torch.export.export(Step(fixed), (TEXT[:, 30:31],), strict=False)
            step = exported.module()
            for token in TEXT[:, 30:60].split(1, 1):
                assert_close(step(token), logits_of(model, token, growing))


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "error", "what"),
        [
            ({"max_cache_len": 0}, ValueError, "at least 1 token, got 0"),
            ({"max_cache_len": 2.5}, TypeError, "must be an int or None, got 2.5"),
            (
                {"max_cache_len": 8, "rotated_copy": True},
                TypeError,
                "rotated_copy must be left out",
            ),
            ({"max_cache_len": 8, "offloading": True}, TypeError, "offloading must be False"),
        ],
    )
    def test_options(self, options, error, what):
        with pytest.raises(error, match=what):
            DynamicYaRNCache(**options)

    def test_a_class_that_grows(self):
        class Own(DynamicYaRNCache):
            pass

        with pytest.raises(TypeError, match=r"must be left out of a Own.*from StaticYaRNCache"):
            Own(max_cache_len=8)

    def test_a_class_of_its_own(self, model):
        class Own(StaticYaRNCache):
            pass

        expected = logits_of(model, TEXT, use_cache=False)
        cache = Own(max_cache_len=ROOM)
        assert_close(in_chunks(model, TEXT, [80, 10], cache), expected)
        assert type(copy.deepcopy(cache)) is Own

    def test_layers_of_two_caches(self, model):
        one, two = (DynamicYaRNCache(max_cache_len=ROOM) for _ in range(2))
        for cache in (one, two):
            in_chunks(model, TEXT[:, :9], [8, 1], cache)
        two.layers = one.layers
        for tokens in (1, 17):
            with pytest.raises(ValueError, match="layer 0 of the cache must be in one place"):
                in_chunks(model, TEXT[:, :tokens], [tokens], two)
        in_chunks(model, TEXT[:, :18], [1, 17], one)
        two.layers = copy.deepcopy(one.layers)  # nobody's, so anybody's
        two.check_layers()

    def test_the_state_of_a_cache_that_grows(self, model):
        cache = DynamicYaRNCache()
        in_chunks(model, TEXT[:, :8], [8], cache)
        with pytest.raises(ValueError, match="state must be of a cache with max_cache_len"):
            StaticYaRNCache.from_state_dict(cache.state_dict())

    @pytest.mark.parametrize("tokens", [10, 40])
    def test_a_text_that_has_no_room(self, model, tokens):
        cache = static(50)
        logits_of(model, TEXT[:, :45], cache)
        with pytest.raises(ValueError, match=f"50 tokens.*got 45 held and {tokens} new ones"):
            logits_of(model, TEXT[:, 45 : 45 + tokens], cache)
        assert cache.get_seq_length() == 45

    def test_another_batch_size(self, model):
        cache = static()
        logits_of(model, TEXT, cache)
        with pytest.raises(ValueError, match="batch size of the cache, 1, got 2"):
            logits_of(model, random_ids(1, rows=2), cache)

    def test_gradients(self, model):
        with pytest.raises(ValueError, match="filled without gradients"):
            model(TEXT, **{CACHE: static()})

    @pytest.mark.parametrize("tokens", [4, 20])
    def test_positions_that_do_not_go_on(self, model, tokens):
        cache = static()
        logits_of(model, TEXT[:, :20], cache)
        with pytest.raises(ValueError, match=r"must go on .* goes on at \[\[20"):
            positions = torch.arange(tokens)[None]
            logits_of(model, TEXT[:, :tokens], cache, position_ids=positions)

    @pytest.mark.parametrize("tokens", [4, 20])
    def test_masks(self, model, tokens):
        cache = static()
        logits_of(model, TEXT[:, :20], cache)
        mask = torch.ones(1, 20 + tokens)
        mask[0, 3] = 0
        with pytest.raises(ValueError, match="what it said when they came"):
            logits_of(model, TEXT[:, :tokens], cache, attention_mask=mask)
        with pytest.raises(ValueError, match=r"\(batch, new tokens\) or"):
            four = torch.ones(1, 1, tokens, 20 + tokens, dtype=torch.bool)
            logits_of(model, TEXT[:, :tokens], cache, attention_mask=four)

    @pytest.mark.parametrize("tokens", [1, 30])
    def test_another_dtype(self, model, tokens):
        cache = static()
        logits_of(model, TEXT[:, :20], cache)
        with (
            pytest.raises(ValueError, match=r"must have the dtype.*got \(torch.bfloat16"),
            torch.autocast("cpu", torch.bfloat16),
        ):
            logits_of(model, TEXT[:, 20 : 20 + tokens], cache)
        assert_close(
            logits_of(model, TEXT[:, 20:50], cache),
            logits_of(model, TEXT[:, :50], use_cache=False)[:, 20:],
        )

    @pytest.mark.parametrize("tokens", [4, 20])
    @pytest.mark.parametrize(
        ("given", "error", "what"),
        [
            ({"position_ids": [[20]]}, TypeError, "must be an integer torch.Tensor"),
            ({"position_ids": torch.ones(1, 4)}, TypeError, "must be an integer torch.Tensor"),
            ({"position_ids": torch.arange(3)[None]}, ValueError, "must be .batch or 1, new"),
            ({"position_ids": torch.tensor(20)}, ValueError, "must be .batch or 1, new"),
            ({"attention_mask": [[1]]}, TypeError, "must be a torch.Tensor or None, got list"),
            ({"attention_mask": torch.ones(1, 999)}, ValueError, r"must be \(batch, new tokens"),
        ],
        ids=["list", "floats", "short", "number", "list as mask", "wide mask"],
    )
    def test_other_kinds_and_shapes(self, model, tokens, given, error, what):
        cache = static()
        logits_of(model, TEXT[:, :20], cache)
        with pytest.raises(error, match=what):
            logits_of(model, TEXT[:, :tokens], cache, **given)
        assert cache.get_seq_length() == 20

    @pytest.mark.parametrize("shape", [(0, 5), (1, 0)])
    def test_no_tokens(self, model, shape):
        with pytest.raises(ValueError, match="at least one row and at least one token"):
            logits_of(model, torch.ones(shape, dtype=torch.long), static())

    def test_the_schedule_of_a_call(self):
        model = tiny_llama()
        patch_llama(model, schedule="forward")
        for cache in (static(), StaticCache(config=model.config, max_cache_len=99)):
            with pytest.raises(ValueError, match='must be "position" over a cache of fixed size'):
                logits_of(model, TEXT, cache)

    def test_a_stock_cache_that_does_not_tell_its_size(self):
        model = tiny("mistral-window")
        patch_llama(model)
        cache = StaticCache(config=model.config, max_cache_len=99)
        with pytest.raises(TypeError, match=r"Pass a DynamicYaRNCache\(max_cache_len"):
            logits_of(model, TEXT[:, :8], cache)

    def test_a_filled_stock_cache(self):
        model = tiny_llama()
        cache = StaticCache(config=model.config, max_cache_len=99)
        logits_of(model, TEXT[:, :8], cache)
        patch_llama(model)
        with pytest.raises(TypeError, match="StaticCache with 8 tokens"):
            logits_of(model, TEXT[:, 8:9], cache)

    def test_generating_by_a_patched_decoder(self):
        model = tiny_llama()
        patch_llama(model.model)
        asked = {"new_tokens": 4, "cache_implementation": "static"}
        # Whether it is the cache that is asked for masks, or the model that gets them, varies.
        with pytest.raises((TypeError, ValueError), match="decoder alone"):
            generate(model, TEXT, **asked)

    def test_an_unpatched_model(self, model):
        cache = static()
        logits_of(model, TEXT, cache)
        unpatch_llama(model)
        with pytest.raises(TypeError, match="must be used with a patched model"):
            logits_of(model, TEXT[:, :1], cache)

    def test_an_unpatched_model_after_an_interrupted_step(self, model):
        """With a mask of its own, of which the cache is not asked."""

        def interrupted(*_):
            raise KeyboardInterrupt

        cache = static()
        logits_of(model, TEXT[:, :20], cache)
        hook = model.model.norm.register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            logits_of(model, TEXT[:, 20:21], cache)
        hook.remove()
        unpatch_llama(model)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        with pytest.raises(TypeError, match="must be used with a patched model"):
            logits_of(model, TEXT[:, 20:21], cache, attention_mask=mask)

    def test_other_options(self, model):
        cache = static()
        logits_of(model, TEXT, cache)
        patch_llama(model, rescale_every=STEP + 1)
        with pytest.raises(ValueError, match="under the options that filled it"):
            logits_of(model, TEXT[:, :1], cache)

    @pytest.mark.parametrize(
        "change",
        [{"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {"num_key_value_heads": 1}],
        ids=str,
    )
    def test_a_step_of_another_model(self, model, change):
        other, cache = tiny_llama(**change), static()
        patch_llama(other, rescale_every=STEP)
        logits_of(model, TEXT, cache)
        with pytest.raises(ValueError, match="continued by the model that filled it"):
            logits_of(other, TEXT[:, :1], cache)
        compiled = torch.compile(other, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="continued by the model that filled it"):
            logits_of(compiled, TEXT[:, :1], cache)

    def test_a_change_within_a_step(self, model):
        cache = static()
        logits_of(model, TEXT[:, :40], cache)
        hook = model.model.norm.register_forward_pre_hook(lambda *_: cache.crop(-1))
        with pytest.raises(ValueError, match="left alone while a forward call fills it"):
            logits_of(model, TEXT[:, 40:41], cache)
        hook.remove()
        assert cache.positions[0].tolist() == list(range(39))

    def test_a_step_in_a_second_thread(self, model):
        cache, refused = static(), []
        logits_of(model, TEXT[:, :40], cache)

        def step_elsewhere(*_):
            with pytest.raises(ValueError, match="in one forward call at a time"):
                logits_of(model, TEXT[:, 40:41], cache)
            refused.append(True)

        def elsewhere(*_):
            hook.remove()
            thread = Thread(target=step_elsewhere)
            thread.start()
            thread.join()

        hook = model.model.layers[1].register_forward_pre_hook(elsewhere)
        logits_of(model, TEXT[:, 40:41], cache)
        assert refused == [True]
        assert cache.get_seq_length() == 41
