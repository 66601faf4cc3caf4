"""What a user may do to a cache by hand, between two calls.

Keys and values may be edited in place or replaced: the cache goes by what it holds then, with a
rotated copy and without. All else is refused by name, before anything is changed.
"""

import copy
import pickle
import threading

import pytest
import torch
from conftest import assert_close, logits_of, random_ids
from oracle import CACHE
from transformers.cache_utils import DynamicLayer

from hf_dynyarn import DynamicYaRNCache, patch_llama

TEXT = random_ids(70)
FILLED = 45  # past the window, with a rotated copy in use

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
COPIES = pytest.mark.parametrize("rotated_copy", [True, False], ids=["copy", "no copy"])


@pytest.fixture
def patched(model):
    patch_llama(model, rescale_every=7)
    return model


def filled(model, tokens=FILLED, rows=1, mode=torch.no_grad, **options):
    """A cache of `tokens` tokens, the last of which came by itself."""
    cache = DynamicYaRNCache(**options)
    with mode():
        model(random_ids(tokens, rows)[:, :-1], **{CACHE: cache})
        model(random_ids(tokens, rows)[:, -1:], **{CACHE: cache})
    return cache


def as_told(cache):
    """A cache made anew of what a cache holds."""
    return DynamicYaRNCache.from_state_dict(cache.state_dict())


def halve_keys(layer):
    layer.keys.mul_(0.5)


def halve_some_keys(layer):
    layer.keys[:, 0, 3:5] *= 0.5


def halve_detached_keys(layer):
    layer.keys.detach().mul_(0.5)


def halve_keys_behind_torchs_back(layer):
    layer.keys.data.mul_(0.5)
    layer.keys = layer.keys


def replace_keys(layer):
    layer.keys = layer.keys * 0.5


def replace_then_edit_keys(layer):
    layer.keys = layer.keys * 0.5
    layer.keys.mul_(0.5)


def swap_rows(layer):
    layer.keys, layer.values = layer.keys[[1, 0]], layer.values[[1, 0]]


def halve_values(layer):
    layer.values.mul_(0.5)


def replace_values(layer):
    layer.values = layer.values * 0.5


class TestEditedKeysAndValues:
    @MODES
    @COPIES
    @pytest.mark.parametrize(
        "edit",
        [
            halve_keys,
            halve_some_keys,
            halve_detached_keys,
            halve_keys_behind_torchs_back,
            replace_keys,
            replace_then_edit_keys,
            swap_rows,
            halve_values,
            replace_values,
        ],
    )
    def test_are_what_the_next_call_sees(self, patched, edit, rotated_copy, mode):
        with mode():
            cache = filled(patched, rows=2, mode=mode, rotated_copy=rotated_copy)
            tokens = TEXT[:, :9].expand(2, 9).split(1, 1)  # over a stair
            unedited = logits_of(patched, tokens[0], as_told(cache))
            for layer in cache.layers:
                edit(layer)
            expected = as_told(cache)
            assert (logits_of(patched, tokens[0], as_told(cache)) - unedited).abs().max() > 0.1
            for token in tokens:
                given = patched(token, **{CACHE: cache}).logits.detach()
                assert_close(given, logits_of(patched, token, expected))

    @MODES
    @pytest.mark.parametrize("move", ["reorder", "crop", "to", "deepcopy", "pickle", "failure"])
    @pytest.mark.parametrize("edit_first", [True, False], ids=["edit first", "move first"])
    def test_with_a_move_between(self, patched, move, edit_first, mode):
        def fail(*_):
            raise RuntimeError("half way")

        def moved(cache):
            if move == "reorder":
                cache.reorder_cache(torch.tensor([1, 0]))
            elif move == "crop":
                cache.crop(-1)
            elif move == "to":
                cache.to("cpu")
            elif move == "failure":
                hook = patched.model.layers[1].mlp.register_forward_pre_hook(fail)
                with pytest.raises(RuntimeError, match="half way"):
                    patched(TEXT[:, :2].expand(2, 2), **{CACHE: cache})
                hook.remove()
            else:
                return copy.deepcopy(cache) if move == "deepcopy" else pickled(cache)
            return cache

        with mode():
            cache = filled(patched, rows=2, mode=mode)
            if not edit_first:
                cache = moved(cache)
                if mode is torch.enable_grad and move == "pickle":
                    pytest.skip("torch's pickles are leaves, which it lets nobody edit in place")
            for layer in cache.layers:
                layer.keys.mul_(0.5)
            if edit_first:
                cache = moved(cache)
            expected = as_told(cache)
            token = TEXT[:, :1].expand(2, 1)
            given = patched(token, **{CACHE: cache}).logits
            assert_close(given.detach(), logits_of(patched, token, expected))

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_where_there_are_none_a_step_rotates_one_key(self, patched, mode, monkeypatch):
        from hf_dynyarn import rotated as room

        rotated = []
        rotate = room.rotate

        def counted(keys, *args, **kwargs):
            rotated.append(keys.shape[2])
            return rotate(keys, *args, **kwargs)

        cache = filled(patched, rows=2, mode=mode)
        monkeypatch.setattr(room, "rotate", counted)
        with mode():
            cache.reorder_cache(torch.tensor([1, 0]))
            patched(TEXT[:, :1].expand(2, 1), **{CACHE: cache})
        assert rotated == [1, 1, 1]

    def test_positions_are_a_copy(self, patched):
        cache = filled(patched)
        expected = logits_of(patched, TEXT[:, :1], copy.deepcopy(cache))
        cache.positions.fill_(3)
        assert cache.positions[0].tolist() == list(range(FILLED))
        assert_close(logits_of(patched, TEXT[:, :1], cache), expected, 0)


def test_filled_in_inference_mode_and_trained_on(patched):
    """The gradient of the tokens after a prefix that has none."""
    expected = filled(patched, mode=torch.no_grad)
    cache = filled(patched, mode=torch.inference_mode)
    gradients = []
    for one in (expected, cache):
        patched.zero_grad()
        patched(TEXT[:, :5], labels=TEXT[:, :5], **{CACHE: one}).loss.backward()
        gradients.append(patched.model.layers[1].self_attn.k_proj.weight.grad.clone())
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def pickled(cache):
    return pickle.loads(pickle.dumps(cache))


def every_use(model, cache):
    """What a cache is asked to do, by name."""
    return {
        "a call": lambda: logits_of(model, TEXT[:, :1], cache),
        "crop": lambda: cache.crop(-1),
        "reorder_cache": lambda: cache.reorder_cache(torch.tensor([0])),
        "batch_repeat_interleave": lambda: cache.batch_repeat_interleave(2),
        "state_dict": cache.state_dict,
        "deepcopy": lambda: copy.deepcopy(cache),
        "pickle": lambda: pickled(cache),
    }


def assert_refused(model, cache, error, match):
    for name, use in every_use(model, cache).items():
        with pytest.raises(error, match=match):
            use()
            pytest.fail(f"{name} went through")
    cache.reset()
    logits_of(model, TEXT, cache)


def longer(states, by=19):
    return torch.cat((states, states[:, :, :by]), dim=2)


class TestPutTogetherByHand:
    def test_more_tokens(self, patched):
        cache = filled(patched, 20)
        for layer in cache.layers:
            layer.keys, layer.values = longer(layer.keys), longer(layer.values)
        message = r"layer 0 of the cache must hold 20 tokens.*got 39.*by calling the model"
        assert_refused(patched, cache, ValueError, message)

    def test_more_tokens_after_a_failed_call(self, patched):
        cache = filled(patched, 20)

        def fail(*_):
            raise RuntimeError("half way")

        hook = patched.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="half way"):
            logits_of(patched, TEXT[:, :3], cache)
        hook.remove()
        layer = cache.layers[0]
        layer.keys, layer.values = longer(layer.keys), longer(layer.values)
        assert_refused(patched, cache, ValueError, "layer 0 of the cache must hold 20 tokens")

    @pytest.mark.parametrize("name", ["keys", "values"])
    @pytest.mark.parametrize("tokens", [39, 7])
    def test_keys_or_values_alone(self, patched, name, tokens):
        cache = filled(patched, 20)
        states = longer(getattr(cache.layers[2], name))[:, :, :tokens]
        setattr(cache.layers[2], name, states)
        message = f"layer 2 of the cache must hold 20 tokens.*got .*{tokens}"
        assert_refused(patched, cache, ValueError, message)

    def test_other_rows(self, patched):
        cache = filled(patched, 20)
        for layer in cache.layers:
            layer.batch_repeat_interleave(2)
        assert_refused(patched, cache, ValueError, r"layer 0 of the cache must hold .*1 row.*got")

    @pytest.mark.parametrize("states", [torch.zeros(0), [1], "keys"], ids=["flat", "list", "text"])
    @pytest.mark.parametrize("name", ["keys", "values"])
    def test_no_states(self, patched, name, states):
        cache = filled(patched, 20)
        got = r"\(0,\)" if isinstance(states, torch.Tensor) else f"a {type(states).__name__}"
        with pytest.raises(ValueError, match=rf"{name} of a layer must be .* got {got}"):
            setattr(cache.layers[0], name, states)
        assert getattr(cache.layers[0], name).shape == (1, 2, 20, 16)

    def test_another_dtype(self, patched):
        cache = filled(patched, 20)
        cache.layers[1].values = cache.layers[1].values.bfloat16()
        assert_refused(patched, cache, ValueError, r"layer 1 of the cache .*dtype.*bfloat16")

    def test_a_layer_that_was_emptied(self, patched):
        cache = filled(patched, 20)
        cache.layers[1].keys = cache.layers[1].values = None
        assert_refused(patched, cache, ValueError, r"layer 1 of the cache must hold 20.*got None")

    def test_an_empty_cache(self, patched):
        keys = filled(patched, 20).layers[0].keys
        cache = DynamicYaRNCache()
        cache.layers.append(type(filled(patched, 20).layers[0])())
        cache.layers[0].keys = cache.layers[0].values = keys
        with pytest.raises(ValueError, match=r"layer 0 of the cache must hold 0 tokens.*got 20"):
            logits_of(patched, TEXT[:, :1], cache)
        cache.reset()
        logits_of(patched, TEXT, cache)

    def test_a_layer_of_another_kind(self, patched):
        cache = filled(patched, 20)
        other = DynamicLayer()
        other.update(cache.layers[1].keys, cache.layers[1].values)
        cache.layers[1] = other
        assert_refused(patched, cache, TypeError, "must be a DynamicYaRNLayer, got a DynamicLayer")

    @pytest.mark.parametrize("change", ["one less", "one more"])
    def test_the_number_of_layers(self, patched, change):
        cache = filled(patched, 20)
        if change == "one less":
            cache.layers.pop()
        else:
            cache.layers.append(copy.deepcopy(cache.layers[0]))
        with pytest.raises(ValueError, match=f"with {len(cache.layers)} layers, got 3"):
            logits_of(patched, TEXT[:, :1], cache)

    def test_update_of_a_layer(self, patched):
        cache = filled(patched, 20)
        new = torch.zeros(1, 2, 1, 16)
        with pytest.raises(TypeError, match="by calling the model"):
            cache.layers[0].update(new, new)

    def test_a_layer_of_its_own_making(self, patched):
        """The right tokens in a layer made by hand are as good as any."""
        cache = filled(patched, 20)
        expected = logits_of(patched, TEXT[:, :1], copy.deepcopy(cache))
        layer = type(cache.layers[0])()
        layer.keys, layer.values = cache.layers[1].keys, cache.layers[1].values
        cache.layers[1] = layer
        assert_close(logits_of(patched, TEXT[:, :1], cache), expected)


SHARE = {
    "list": lambda cache, other: setattr(other, "layers", cache.layers),
    "copied list": lambda cache, other: setattr(other, "layers", cache.layers.copy()),
    "extended": lambda cache, other: other.layers.extend(cache.layers),
    "replaced": lambda cache, other: other.layers.__setitem__(slice(None), cache.layers),
}


class TestTwoOwners:
    @MODES
    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
    def test_copies_go_on_by_themselves(self, patched, copied, mode):
        prefix = TEXT[:, :20]
        with mode():
            cache = DynamicYaRNCache()
            patched(prefix, **{CACHE: cache})
            other = copied(cache)
            texts = {cache: random_ids(30, seed=1), other: random_ids(30, seed=2)}
            logits = {cache: [], other: []}
            for start in range(0, 30, 6):
                for one, text in texts.items():
                    new = text[:, start : start + 6]
                    logits[one].append(patched(new, **{CACHE: one}).logits.detach())
            for one, text in texts.items():
                whole = logits_of(patched, torch.cat((prefix, text), dim=1), use_cache=False)
                assert_close(torch.cat(logits[one], dim=1), whole[:, 20:])

    def test_editing_a_copy_leaves_the_original(self, patched):
        cache = filled(patched)
        before = cache.state_dict()
        tensors = [name for name in before if name != "hf_dynyarn"]
        other = copy.copy(cache)
        other.layers[0].keys.zero_()
        other.layers[0].values.zero_()
        other.crop(-3)
        after = cache.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in tensors)

    def test_copies_of_layers(self, patched):
        cache, other = filled(patched, 20), filled(patched, 20)
        other.layers = [copy.copy(layer) for layer in cache.layers]
        expected = logits_of(patched, TEXT[:, :1], copy.deepcopy(cache))
        assert_close(logits_of(patched, TEXT[:, :1], other), expected)
        assert_close(logits_of(patched, TEXT[:, :1], cache), expected)

    @pytest.mark.parametrize("share", SHARE.values(), ids=SHARE.keys())
    @pytest.mark.parametrize("tokens", [0, 20, 30])
    def test_shared_layers_are_refused(self, patched, share, tokens):
        cache = filled(patched, 20)
        other = filled(patched, tokens) if tokens else DynamicYaRNCache()
        share(cache, other)
        with pytest.raises(ValueError, match=r"layer \d of the cache must be .*copy\.deepcopy"):
            logits_of(patched, TEXT[:, :1], other)
        expected = logits_of(patched, TEXT[:, :1], as_told(cache))
        assert_close(logits_of(patched, TEXT[:, :1], cache), expected)

    def test_empty_layers_are_nobodys(self, patched):
        cache = DynamicYaRNCache()
        cache.layers.append(type(filled(patched, 20).layers[0])())
        assert_close(logits_of(patched, TEXT, cache), logits_of(patched, TEXT, use_cache=False))

    def test_layers_whose_owner_is_gone_need_tokens_that_fit(self, patched):
        other = DynamicYaRNCache()
        other.layers = filled(patched, 20).layers
        with pytest.raises(ValueError, match=r"layer 0 of the cache must hold 0 tokens.*20"):
            logits_of(patched, TEXT[:, :1], other)

    def test_a_layer_twice(self, patched):
        cache = filled(patched, 20)
        cache.layers[2] = cache.layers[0]
        assert_refused(patched, cache, ValueError, r"layer 2 of the cache must be .*copy\.deepcopy")

    def test_two_threads(self, patched):
        cache, inside, done = filled(patched, 20), threading.Event(), threading.Event()
        expected = logits_of(patched, TEXT[:, :2], copy.deepcopy(cache))

        def wait(*_):
            if threading.current_thread() is other:
                inside.set()
                assert done.wait(60)

        def call():
            results.append(logits_of(patched, TEXT[:, :2], cache))

        results, other = [], threading.Thread(target=call)
        hook = patched.model.layers[1].register_forward_hook(wait)
        other.start()
        assert inside.wait(60)
        try:
            with pytest.raises(ValueError, match=r"one forward call at a time.*another thread"):
                logits_of(patched, TEXT[:, 5:6], cache)
        finally:
            done.set()
            other.join()
        hook.remove()
        assert_close(results[0], expected)
        assert cache.get_seq_length() == 22

    def test_a_copy_made_within_a_call(self, patched):
        """It is what the cache was before the call, which goes on."""
        cache, copies = filled(patched, 20), []
        expected = logits_of(patched, TEXT[:, :2], copy.deepcopy(cache))
        hook = patched.model.layers[1].register_forward_hook(
            lambda *_: copies.extend([copy.deepcopy(cache), copy.copy(cache), pickled(cache)])
        )
        assert_close(logits_of(patched, TEXT[:, :2], cache), expected)
        hook.remove()
        for one in copies:
            assert one.get_seq_length() == 20
            assert_close(logits_of(patched, TEXT[:, :2], one), expected)


CHANGES = {
    "crop": (lambda model, cache: cache.crop(-1), FILLED - 1),
    "reorder": (lambda model, cache: cache.reorder_cache(torch.tensor([0])), FILLED),
    "reset": (lambda model, cache: cache.reset(), 0),
    "call": (lambda model, cache: logits_of(model, TEXT[:, :1], cache), FILLED + 1),
}


class TestWithinACall:
    """The call is refused at its end, or by a later layer, and its tokens are dropped."""

    @pytest.mark.parametrize("layer", [0, 1, 2])
    @pytest.mark.parametrize(("change", "left"), CHANGES.values(), ids=CHANGES.keys())
    def test_a_change(self, patched, change, left, layer):
        cache, done = filled(patched), []

        def meddle(*_):
            if not done:
                done.append(True)
                change(patched, cache)

        hook = patched.model.layers[layer].register_forward_hook(meddle)
        message = "left alone while a forward call" if layer == 2 else "patched model"
        with pytest.raises(ValueError if layer == 2 else TypeError, match=message):
            logits_of(patched, TEXT[:, :2], cache)
        hook.remove()
        assert cache.get_seq_length() == left
        expected = as_told(cache)
        given = logits_of(patched, TEXT[:, 5:7], cache)
        assert_close(given, logits_of(patched, TEXT[:, 5:7], expected))


class TestReadAsPairs:
    """The keys are not those of a stock cache, and no copy of one must be made of them."""

    USES = (
        lambda cache: [keys for keys, values in cache],
        tuple,
        lambda cache: cache[0],
        lambda cache: cache.to_legacy_cache(),
    )

    @pytest.mark.parametrize("use", USES, ids=["for", "tuple", "index", "to_legacy_cache"])
    def test_is_refused(self, patched, use):
        with pytest.raises(TypeError, match=r"un-rotated.*layers\[i\]\.keys"):
            use(filled(patched, 20))

    def test_length_is_the_number_of_layers(self, patched):
        assert len(filled(patched, 20)) == 3
        assert len(DynamicYaRNCache()) == 0


class TestFilledWithGradients:
    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
    def test_a_copy_carries_them(self, patched, copied):
        """What is computed from a copy reaches the weights that filled it."""

        def gradient_by(way):
            patched.zero_grad()
            cache = DynamicYaRNCache()
            patched(TEXT[:, :40], **{CACHE: cache})
            patched(TEXT[:, 40:45], **{CACHE: way(cache)}).logits.square().sum().backward()
            return patched.model.layers[1].self_attn.k_proj.weight.grad.clone()

        with torch.enable_grad():
            expected = gradient_by(lambda cache: cache)
            largest = expected.abs().max()
            assert_close(gradient_by(copied) / largest, expected / largest)

    def test_of_layers(self, patched):
        with torch.enable_grad():
            cache = filled(patched, mode=torch.enable_grad)
            layer = copy.deepcopy(cache.layers[0])
        assert layer.keys.requires_grad
        assert torch.equal(layer.keys, cache.layers[0].keys)


class TestToADtype:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.zeros(1)])
    def test_is_refused(self, patched, dtype):
        cache = filled(patched, 20)
        before = cache.state_dict()
        with pytest.raises(TypeError, match=r"device must be .* got"):
            cache.to(dtype)
        assert torch.equal(cache.positions, before["positions"])
        assert cache.layers[0].keys.dtype == torch.float32
        if dtype is not None:
            with pytest.raises(TypeError, match=r"device must be .* got"):
                DynamicYaRNCache.from_state_dict(before, dtype)
