"""A patched model in a graph: a graph would keep the scale of the text that it was made with.

`torch.compile` is in `test_neighbours.py`: it leaves out what depends on a scale.
"""

import copy
import inspect
import warnings

import pytest
import torch
from conftest import CACHE, assert_close, logits_of, random_ids, tiny_llama
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from hf_dynyarn import DynamicYaRNCache, patch_llama, unpatch_llama

SHORT, LONG = 8, 12
IDS = random_ids(LONG)


class Logits(nn.Module):
    """Tokens to logits, without a cache, which graphs cannot return."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False, return_dict=False)[0]


@pytest.fixture
def logits():
    model = tiny_llama(max_position_embeddings=SHORT)
    patch_llama(model)
    return Logits(model).eval()


def trace(logits, ids):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about tracing
        return torch.jit.trace(logits, ids, check_trace=False)


def onnx_by_trace(logits, ids):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(logits, (ids,), "never_written.onnx", dynamo=False)


def export(logits, ids):
    return torch.export.export(logits, (ids,))


def export_of_any_length(logits, ids):
    lengths = {1: torch.export.Dim("length", min=2, max=64)}
    return torch.export.export(logits, (ids,), dynamic_shapes=(lengths,))


def fx_of_operators(logits, ids):
    with torch.no_grad():
        return make_fx(logits)(ids)


def fx_of_modules(logits, ids):
    class States(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = logits.model.model

        def forward(self, ids):
            return self.decoder(ids)

    return torch.fx.symbolic_trace(States())


def fake_tensors(logits, ids):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return logits(mode.from_tensor(ids))


def on_meta(logits, ids):
    return copy.deepcopy(logits).to("meta")(ids.to("meta"))


@pytest.mark.parametrize(
    "record",
    [
        trace,
        onnx_by_trace,
        export,
        export_of_any_length,
        fx_of_operators,
        fx_of_modules,
        fake_tensors,
        on_meta,
    ],
)
def test_recording_is_refused_by_name(logits, record):
    before = logits(IDS)
    with pytest.raises(
        ValueError, match=r"patched model must be called on tokens that are there.*unpatch_llama"
    ):
        record(logits, IDS[:, : SHORT - 1])
    assert_close(logits(IDS).detach(), before.detach(), 0)


def test_a_decoder_by_itself(logits):
    with pytest.raises(ValueError, match=r"patched model must be called on tokens that are there"):
        trace(logits.model.model, IDS[:, :7])


def test_strict_export_and_a_full_graph_say_why(logits):
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:
        pytest.skip("the installed torch takes no reason")
    reason = r"keep those of the one that it was recorded with.*unpatch_llama"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        torch.export.export(logits, (IDS[:, :7],), strict=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        torch.compile(logits, backend="eager", fullgraph=True)(IDS)


def test_after_unpatching_a_model_is_exported_as_stock(logits):
    stock = tiny_llama(max_position_embeddings=SHORT)
    with pytest.raises(ValueError, match="must be called on tokens that are there"):
        export(logits, IDS)
    unpatch_llama(logits.model)
    exported = export(logits, IDS).module()
    assert_close(exported(IDS).detach(), logits_of(stock, IDS))


class TestTransformersExporter:
    @pytest.fixture
    def exporter(self):
        dynamo = pytest.importorskip("transformers.exporters.exporter_dynamo")
        if not hasattr(dynamo.DynamoExporter, "export_program"):
            pytest.skip("the installed transformers calls it otherwise")
        return lambda model, inputs, **options: dynamo.DynamoExporter().export_program(
            model, inputs, dynamo.DynamoConfig(**options)
        )

    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    def test_a_prompt(self, logits, exporter, dynamic):
        inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
        with pytest.raises(ValueError, match=r"must be called on tokens"):
            exporter(logits.model, inputs, dynamic=dynamic)

    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    def test_a_decoding_step(self, logits, exporter, dynamic):
        cache = DynamicYaRNCache()
        expected = logits_of(logits.model, IDS)
        logits_of(logits.model, IDS[:, :-1], cache)
        inputs = {
            "input_ids": IDS[:, -1:],
            "attention_mask": torch.ones_like(IDS),
            CACHE: cache,
        }
        with pytest.raises(ValueError, match=r"must be called on tokens"):
            exporter(logits.model, inputs, dynamic=dynamic)
        assert_close(logits_of(logits.model, IDS[:, -1:], cache), expected[:, -1:])

    def test_an_open_cache_is_taken_apart_once_there_was_an_export(self, logits, exporter):
        """By torch, which then knows how: reentrant checkpointing looks so for tensors."""
        with pytest.raises(ValueError, match=r"must be called on tokens that are there"):
            exporter(logits.model, {"input_ids": IDS})
        taken_apart = []

        def take_apart(module, args, kwargs):
            leaves, how = tree_flatten(kwargs[CACHE])
            taken_apart.append((len(leaves), tree_unflatten(leaves, how)))

        layer = logits.model.model.layers[1]
        hook = layer.register_forward_pre_hook(take_apart, with_kwargs=True)
        cache = DynamicYaRNCache()
        first = logits_of(logits.model, IDS[:, :9], cache)
        rest = logits_of(logits.model, IDS[:, 9:], cache)
        hook.remove()
        assert_close(torch.cat((first, rest), 1), logits_of(logits.model, IDS))
        assert all(leaves > 1 for leaves, _ in taken_apart)
        _, again = taken_apart[-1]
        again.reset()
        assert_close(logits_of(logits.model, IDS, again), logits_of(logits.model, IDS))
