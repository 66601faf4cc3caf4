"""Graphs, which would keep the scale of the text that they were recorded with.

What depends on lengths and scales runs outside the graphs of `torch.compile`; a recorder that has
no outside is refused.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_RULE = (
    "scales and cuts depend on how long a text is, and a graph would keep those of the one that it "
    "was recorded with"
)
_REMEDY = "Export the stock model: call unpatch_llama(model) first."

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Makes `torch.compile` leave a function out of its graphs, and say why where it must not."""
    reason = f"in a model patched by hf_dynyarn {_RULE}. {_REMEDY} To compile, leave fullgraph out."
    named = "reason" in inspect.signature(torch.compiler.disable).parameters
    options = {"reason": reason} if named else {}
    outside: Function = torch.compiler.disable(function, **options)
    return outside


def check_not_recorded(inputs: torch.Tensor) -> None:
    """Checks that a call computes with the tokens it is given, and is not recorded for others.

    Args:
        inputs: of the call, `input_ids` or `inputs_embeds`.

    Raises:
        ValueError: the call is recorded.
    """
    recorder = _recorder(inputs)
    if recorder:
        raise ValueError(
            f"a patched model must be called on tokens that are there, for {_RULE}; got a call "
            f"from {recorder}. {_REMEDY}"
        )


def _recorder(inputs: torch.Tensor) -> str | None:
    if isinstance(inputs, torch.fx.Proxy):
        return "torch.fx"
    if torch._C._is_tracing():  # by torch.onnx.export too, unless by dynamo
        return "torch.jit.trace"
    # Older versions of torch do not tell, but export over fake tensors all the same.
    if getattr(torch.compiler, "is_exporting", bool)():
        return "torch.export"
    if get_proxy_mode() is not None:
        return "make_fx"
    if inputs.is_cuda and torch.cuda.is_current_stream_capturing():
        return "the capture of a CUDA graph"
    if inputs.is_meta or isinstance(inputs, FakeTensor):
        return f"a {type(inputs).__name__} on the device {inputs.device}, without data"
    return None


def mark_static(*buffers: torch.Tensor) -> None:
    """Tells `torch.compile` that tensors stay where they are, so that no graph copies them.

    Without a guard on each: other buffers of the same shapes share the graph.
    """
    for buffer in buffers:
        torch._dynamo.mark_static_address(buffer, guard=False)
