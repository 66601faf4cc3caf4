"""The flash path through the real flash-attn package, on the CPU by its own reference.

transformers takes flash-attn for unavailable without a GPU: only that check is patched, so its own
unpadding and its own calls run as they are. It computes in half precision, and its error is held
against that of the stock model.
"""

import flash_attn
import pytest
import torch
from conftest import VOCABULARY, left_padded, logits_of, random_ids, tiny_llama
from families import tiny
from flash_attn import flash_attn_interface
from transformers import modeling_flash_attention_utils

from hf_dynyarn import DynamicYaRNCache, patch_llama, unpatch_llama


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels():
    """Lets the package's two custom ops run on the CPU, where they go to the reference backend."""
    for op in (
        flash_attn_interface._flash_attn_forward,
        flash_attn_interface._flash_attn_varlen_forward,
    ):
        op.register_kernel("cpu")(op._init_fn)


class Calls(list):
    windows: list
    bounds: list


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Makes flash-attn available to transformers; returns which of its functions were called.

    `windows` are the windows that they were given, `bounds` those of documents side by side.
    """
    made = Calls()
    made.windows, made.bounds = [], []

    def counted(name):
        function = getattr(flash_attn, name)

        def call(*args, **kwargs):
            made.append(name)
            made.windows.append(kwargs.get("window_size"))
            made.bounds += [
                (kwargs[k].tolist()) for k in ("cu_seqlens_q", "cu_seqlens_k") if k in kwargs
            ]
            return function(*args, **kwargs)

        call.__signature__ = __import__("inspect").signature(function)
        return call

    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        monkeypatch.setattr(flash_attn, name, counted(name))
    monkeypatch.setattr(
        modeling_flash_attention_utils, "is_flash_attn_2_available", lambda *a, **k: True
    )
    for name in (
        "_flash_fn",
        "_flash_varlen_fn",
        "_pad_fn",
        "_unpad_fn",
        "_process_flash_kwargs_fn",
    ):
        monkeypatch.setattr(modeling_flash_attention_utils, name, None)
    if hasattr(modeling_flash_attention_utils, "_loaded_implementation"):
        monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    return made


@pytest.fixture
def model():
    model = tiny_llama(dtype=torch.float16).half()
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.fixture
def twin():
    """The same weights, patched, in float64 and with sdpa: what flash should come to."""
    twin = tiny_llama().half().double()
    patch_llama(twin, rescale_every=7)
    return twin


@pytest.fixture
def bound(model):
    """1.5 times the error of the stock model with flash, on a text as long as the tests' own."""
    ids = random_ids(90)
    exact = logits_of(tiny_llama().half().double(), ids)
    return 1.5 * (logits_of(model, ids).double() - exact).abs().max().item()


def assert_within(actual, expected, bound):
    assert actual.shape[-1] == VOCABULARY
    assert (actual.double() - expected).abs().max().item() <= bound


def test_one_call_over_many_buckets(model, twin, bound, calls):
    ids = random_ids(90, rows=2)
    patch_llama(model, rescale_every=7)
    calls.clear()
    assert_within(logits_of(model, ids), logits_of(twin, ids), bound)
    assert set(calls) == {"flash_attn_func"}


@pytest.mark.parametrize("sizes", [1, 20, [50, 40]], ids=str)
def test_chunks_and_steps(model, twin, bound, calls, sizes):
    ids = random_ids(90)
    patch_llama(model, rescale_every=7)
    cache, calls[:] = DynamicYaRNCache(), []
    logits = torch.cat([logits_of(model, chunk, cache) for chunk in ids.split(sizes, 1)], 1)
    assert_within(logits, logits_of(twin, ids), bound)
    assert set(calls) == {"flash_attn_func"}


def test_a_padded_batch_and_its_second_turn(model, twin, bound, calls):
    first = [random_ids(length, seed=length)[0] for length in (20, 60, 41)]
    second = [random_ids(length, seed=length)[0] for length in (9, 2, 14)]
    ids, mask = left_padded(first)
    patch_llama(model, rescale_every=7)
    cache, calls[:] = DynamicYaRNCache(), []
    logits = logits_of(model, ids, cache, attention_mask=mask)
    more, more_mask = left_padded(second)
    again = logits_of(model, more, cache, attention_mask=torch.cat((mask, more_mask), 1))
    step = random_ids(1, rows=3, seed=7)
    full = torch.nn.functional.pad(torch.cat((mask, more_mask), 1), (0, 1), value=1)
    last = logits_of(model, step, cache, attention_mask=full)
    for row in range(3):
        solo = logits_of(twin, torch.cat((first[row], second[row], step[row]))[None])[0]
        ours = torch.cat(
            (logits[row][mask[row].bool()], again[row][more_mask[row].bool()], last[row])
        )
        assert_within(ours, solo, bound)
    assert "flash_attn_varlen_func" in calls


def test_packed_documents(model, twin, bound):
    lengths = (40, 5, 60)
    ids = random_ids(105)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    patch_llama(model, rescale_every=7)
    solo = torch.cat([logits_of(twin, document) for document in ids.split(lengths, 1)], 1)
    assert_within(logits_of(model, ids, position_ids=positions, use_cache=False), solo, bound)


class TestDocumentsSideBySide:
    """Documents of one scale go to the kernel together, with their bounds."""

    LENGTHS = (10, 5, 40, 7, 1, 60)
    IDS = random_ids(123)
    POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]

    def solo(self, twin):
        return torch.cat([logits_of(twin, one) for one in self.IDS.split(self.LENGTHS, 1)], 1)

    @pytest.mark.parametrize("lengths_too", [False, True], ids=["positions", "lengths_too"])
    def test_one_call_for_each_run_of_a_scale(self, model, twin, bound, calls, lengths_too):
        patch_llama(model, rescale_every=7)
        kwargs = {}
        if lengths_too:
            bounds = torch.tensor([0, *self.LENGTHS]).cumsum(0).int()
            kwargs = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            kwargs |= {"max_length_q": 60, "max_length_k": 60}
        calls.clear()
        calls.bounds.clear()
        logits = logits_of(model, self.IDS, position_ids=self.POSITIONS, use_cache=False, **kwargs)
        assert_within(logits, self.solo(twin), bound)
        # Up to the window of the third; its two stairs; the rest up to that of the last; its four.
        assert len(calls) == 3 * (1 + 2 + 1 + 4)
        assert calls.count("flash_attn_varlen_func") == 3 * 2
        assert calls.bounds[:2] == [[0, 10, 15, 47]] * 2
        assert calls.bounds[-2:] == [[0, 7, 8, 40]] * 2

    def test_a_document_that_goes_on_from_the_cache(self, model, twin, bound, calls):
        patch_llama(model, rescale_every=7)
        cache = DynamicYaRNCache()
        first = logits_of(model, self.IDS[:, :6], cache)
        calls.bounds.clear()
        rest = logits_of(model, self.IDS[:, 6:], cache, position_ids=self.POSITIONS[:, 6:])
        assert_within(torch.cat((first, rest), 1), self.solo(twin), bound)
        assert calls.bounds[:2] == [[0, 4, 9, 41], [0, 10, 15, 47]]

    def test_a_window(self, calls):
        """Of the call alone: see `test_windows`. At the trained scale all are side by side."""
        model = tiny("mistral-window", "sdpa").half()
        model.config._attn_implementation = "flash_attention_2"
        patch_llama(model, rescale_every=7)
        logits_of(model, self.IDS, position_ids=self.POSITIONS, use_cache=False)
        assert calls.bounds == [[0, 10, 15, 55, 62, 63, 123]] * 2 * 4
        assert {window[0] for window in calls.windows} == {model.config.sliding_window - 1}

    def test_padding_in_a_cache_keeps_them_apart(self, model, twin, bound):
        """The kernel is then told of padding, in place of documents."""
        patch_llama(model, rescale_every=7)
        cache = DynamicYaRNCache()
        padded = torch.nn.functional.pad(self.IDS[:, :6], (3, 0))
        mask = torch.tensor([[0] * 3 + [1] * 6])
        first = logits_of(model, padded, cache, attention_mask=mask)[:, 3:]
        rest = logits_of(model, self.IDS[:, 6:], cache, position_ids=self.POSITIONS[:, 6:])
        assert_within(torch.cat((first, rest), 1), self.solo(twin), bound)


def test_teeth(model, twin, bound):
    """A wrong step of the scale is far outside the bound."""
    ids = random_ids(90)
    patch_llama(model, rescale_every=50)
    assert (logits_of(model, ids).double() - logits_of(twin, ids)).abs().max().item() > 5 * bound


def test_setting_flash_on_a_patched_model(twin, model, bound):
    model.config._attn_implementation = "sdpa"
    patch_llama(model, rescale_every=7)
    model.config._attn_implementation = "flash_attention_2"
    ids = random_ids(60)
    assert_within(logits_of(model, ids), logits_of(twin, ids), bound)
    unpatch_llama(model)
    assert model.config._attn_implementation == "flash_attention_2"


class TestRefused:
    def test_a_mask_of_the_caller(self, model):
        patch_llama(model)
        mask = torch.ones(1, 1, 40, 40).tril().bool()
        with pytest.raises(
            ValueError, match=r"flash_attention_2 can follow.*got a 4-D attention_mask"
        ):
            logits_of(model, random_ids(40), attention_mask=mask)

    def test_rows_packed_differently(self, model):
        patch_llama(model)
        positions = torch.tensor([[*range(30), *range(10)], [*range(10), *range(30)]])
        with pytest.raises(ValueError, match=r"got packed documents in several rows"):
            logits_of(model, random_ids(40, rows=2), position_ids=positions)


@pytest.mark.parametrize(
    ("case", "window"), [("ministral", 12), ("mistral-window past the trained one", 40)]
)
def test_windows(case, window, calls):
    """Steps are compared; of a prefill the call, since the reference on the CPU has no windows."""
    model, exact = tiny(case).to(torch.bfloat16), tiny(case).to(torch.bfloat16).double()
    ids = random_ids(60)
    for one in (model, exact):
        patch_llama(one, rescale_every=4)
    expected = logits_of(exact, ids)[:, 50:]
    errors = {}
    for backend in ("sdpa", "flash_attention_2"):
        cache = DynamicYaRNCache()
        model.config._attn_implementation = "sdpa"
        logits_of(model, ids[:, :50], cache)
        model.config._attn_implementation = backend
        calls.clear()
        steps = [logits_of(model, token, cache) for token in ids[:, 50:].split(1, 1)]
        errors[backend] = (torch.cat(steps, dim=1) - expected).abs().mean()
    assert errors["flash_attention_2"] < 1.5 * errors["sdpa"]
    assert set(calls) == {"flash_attn_func"}
    assert not any(calls.windows)  # a step is given the keys of its window alone
    logits_of(model, ids)
    assert {w[0] for w in calls.windows if w} == {window - 1}
