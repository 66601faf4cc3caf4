"""What a user does with a cache: crop, copy, reorder, select, move."""

import copy
import pickle

import oracle
import pytest
import torch
from conftest import (
    TEXT,
    WINDOW,
    assert_close,
    assert_holds,
    assert_same,
    filled,
    generate,
    left_padded,
    logits_of,
    random_ids,
)

from hf_dynyarn import DynamicYaRNCache, patch_llama


@pytest.fixture
def patched(model):
    patch_llama(model, rescale_every=7)
    return model


class TestCacheOperations:
    """Each on a cache of more than a window, continued for more than a stair."""

    def test_crop(self, patched, new_cache):
        ids = random_ids(60)
        for remove in (1, 15, 40):
            cache = filled(patched, ids, new_cache())
            cache.crop(-remove)
            assert cache.get_seq_length() == 60 - remove
            assert cache.scales == [oracle.scale_at(59 - remove, WINDOW, 7)]
            assert_holds(cache, patched, ids[:, :-remove])

    def test_crop_to_nothing(self, patched, new_cache):
        cache = filled(patched, random_ids(60), new_cache())
        cache.crop(-60)
        assert cache.get_seq_length() == 0
        assert cache.scales == []
        assert_holds(cache, patched, random_ids(3, rows=2)[:, :0])

    def test_crop_back_to_one_document(self, patched, new_cache):
        ids, positions = random_ids(60), torch.tensor([[*range(40), *range(20)]])
        cache = new_cache()
        logits_of(patched, ids, cache, position_ids=positions)
        cache.crop(-20)
        reply = generate(patched, ids[:, :41], cache)
        assert torch.equal(reply, generate(patched, ids[:, :41], use_cache=False))

    def test_reorder(self, patched, new_cache):
        ids = random_ids(60, rows=3)
        cache = filled(patched, ids, new_cache())
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert_holds(cache, patched, ids[[2, 0, 0]])

    def test_reorder_of_unequal_rows(self, patched, new_cache):
        rows = [random_ids(length, seed=length)[0] for length in (20, 50)]
        ids, mask = left_padded(rows)
        cache = new_cache()
        logits_of(patched, ids, cache, attention_mask=mask)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert cache.scales == [oracle.scale_at(49, WINDOW, 7), 1]
        more = random_ids(20, rows=2, seed=5)
        logits = logits_of(patched, more, cache)
        for row, tokens, new in zip(logits, (rows[1], rows[0]), more, strict=True):
            whole = torch.cat((tokens, new))[None]
            assert_close(row, logits_of(patched, whole, use_cache=False)[0, -20:])

    def test_repeat_interleave(self, patched, new_cache):
        ids = random_ids(60, rows=2)
        cache = filled(patched, ids, new_cache())
        cache.batch_repeat_interleave(3)
        assert_holds(cache, patched, ids.repeat_interleave(3, 0))

    @pytest.mark.parametrize("indices", [[2, 0], [True, False, True]], ids=["indices", "mask"])
    @pytest.mark.parametrize("as_tensor", [True, False])
    def test_select(self, patched, new_cache, indices, as_tensor):
        ids = random_ids(60, rows=3)
        cache = filled(patched, ids, new_cache())
        cache.batch_select_indices(torch.tensor(indices) if as_tensor else indices)
        assert_holds(cache, patched, ids[torch.tensor(indices)])

    def test_reset(self, patched, new_cache):
        cache = filled(patched, random_ids(60), new_cache())
        cache.reset()
        assert cache.get_seq_length() == 0
        patch_llama(patched, rescale_every=3)  # whatever filled it is forgotten
        assert_holds(cache, patched, random_ids(60, rows=2)[:, :0])

    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))],
        ids=["deepcopy", "pickle"],
    )
    def test_copies_go_their_own_ways(self, patched, new_cache, copied):
        ids = random_ids(60)
        cache = filled(patched, ids, new_cache())
        other = copied(cache)
        assert_holds(cache, patched, ids, seed=5)
        assert_holds(other, patched, ids, seed=6)

    def test_a_prefix_serves_several_questions(self, patched, new_cache):
        prefix = random_ids(50)
        cache = filled(patched, prefix, new_cache())
        for seed in range(3):
            whole = torch.cat((prefix, random_ids(5, seed=seed)), 1)
            reply = generate(patched, whole, copy.deepcopy(cache))
            assert torch.equal(reply, generate(patched, whole, use_cache=False))


class TestDevices:
    """There is no GPU here: `meta`, which has shapes and no data, is the other device."""

    def tensors(self, cache):
        for layer in cache.layers:
            yield from (layer.keys, layer.values, layer.rotated._buffer)
        yield cache.positions

    def test_to_returns_the_cache_itself(self, model):
        patch_llama(model)
        cache, before = filled(model), filled(model)
        assert cache.to("cpu") is cache
        assert_same(cache, before)
        assert cache.layers[0].rotated._last == 40  # nothing to rotate again
        expected = logits_of(model, TEXT, use_cache=False)[:, 40:]
        assert_close(logits_of(model, TEXT[:, 40:], cache), expected)

    def test_to_moves_everything(self, model):
        patch_llama(model)
        cache = filled(model).to("meta")
        assert {part.device.type for part in self.tensors(cache)} == {"meta"}
        assert cache.get_seq_length() == 40

    def test_an_empty_cache(self):
        assert DynamicYaRNCache().to("cpu").to(torch.device("cpu")).get_seq_length() == 0

    def test_load_onto_a_device(self, model, path):
        patch_llama(model)
        filled(model).save(path)
        cache = DynamicYaRNCache.load(path, device="meta")
        assert {layer.keys.device.type for layer in cache.layers} == {"meta"}
        assert cache.positions.device.type == "meta"
        assert DynamicYaRNCache.load(path, device="cpu").scales == [40 / 32]

    def test_a_layer_follows_its_model(self, model):
        """A loaded cache is on the CPU, while each layer of the model may be somewhere else."""
        patch_llama(model)
        cache, call = filled(model), torch.nn.Module()
        cache.begin(call)
        new = torch.empty(1, 2, 5, 16, device="meta")
        with torch.no_grad():
            keys, values = cache.update(new, new, 1)
        assert (keys.shape, keys.device.type) == ((1, 2, 45, 16), "meta")
        assert values.device.type == cache.layers[1].rotated._buffer.device.type == "meta"
        assert cache.layers[0].keys.device.type == "cpu"

    def test_positions_follow_the_newest(self, model):
        patch_llama(model)
        cache = filled(model)
        cache.begin(model)  # which stands for a call
        cache.commit(torch.empty((1, 5), dtype=torch.int64, device="meta"), cache.schedule, False)
        assert (cache.positions.shape, cache.positions.device.type) == ((1, 45), "meta")

    def test_to_leaves_an_unfinished_forward_call_alone(self, model):
        """As accelerate's hooks call it, at every layer, where they are not told to skip it."""
        patch_llama(model)
        cache = filled(model)
        expected = logits_of(model, TEXT, use_cache=False)[:, 40:]
        hook = model.model.layers[1].register_forward_pre_hook(
            lambda module, args: cache.to("meta") and None
        )
        assert_close(logits_of(model, TEXT[:, 40:], cache), expected)
        hook.remove()
