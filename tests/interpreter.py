"""Triton's interpreter, which runs kernels on the CPU. See `make test-kernels`."""

import os
from functools import partial

# Triton reads it when it is first imported, which torch and transformers do.
if os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError(
        "TRITON_INTERPRET must be 1 from the start of the process, got "
        f"{os.environ.get('TRITON_INTERPRET')}. Use make test-kernels."
    )

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_product = interpreter.InterpreterBuilder.create_dot
_converted = interpreter._convert_float


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """NumPy has no bfloat16: the interpreter would multiply its bits as integers."""
    widened = []
    for one in (a, b):
        if one.dtype.scalar == tl.bfloat16:
            data = _convert_float(one.data, tl.bfloat16, tl.float32, None)
            one = interpreter.TensorHandle(data.view(np.float32), tl.float32)
        widened.append(one)
    return _product(self, *widened, d, input_precision, max_num_imprecise_acc)


def _convert_float(numbers, source, target, rounding):
    """To the nearest bfloat16 as on a GPU: the interpreter cuts what is too long."""
    if source == tl.float32 and target == tl.bfloat16:
        floats = np.ascontiguousarray(numbers).view(np.float32)
        return torch.from_numpy(floats).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return _converted(numbers, source, target, rounding)


interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter._convert_float = _convert_float


def interpret(monkeypatch, processors=6):
    """Lets the fused operation on CPU tensors run the kernels, cut for a device of that size."""
    from hf_dynyarn.backends import fused
    from hf_dynyarn.backends.fused_triton import launch

    kernels = partial(launch, processors=processors)
    monkeypatch.setattr(fused, "implementation_for", lambda device_type: kernels)
