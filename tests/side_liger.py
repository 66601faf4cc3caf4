"""Liger's fused loss and a patched model, in Triton's interpreter, which needs no GPU.

Prints how far logits, loss and gradients are from those without Liger, and whether tokens are the
same. In a process of its own, for the interpreter is chosen before Triton is imported.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from conftest import generate, logits_of, random_ids, tiny_llama
from liger_kernel.transformers import apply_liger_kernel_to_llama

from hf_dynyarn import patch_llama

IDS = random_ids(70)


def results(model):
    patch_llama(model, rescale_every=7)
    logits, tokens = logits_of(model, IDS), generate(model, IDS, new_tokens=5)
    loss = model.train()(IDS, labels=IDS).loss
    loss.backward()
    return logits, loss.detach(), model.model.layers[0].self_attn.k_proj.weight.grad, tokens


plain, liger = tiny_llama(), tiny_llama()
expected = results(plain)
# The other kernels take Python floats, which the interpreter cannot yet.
apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False, model=liger)
found = results(liger)
print(
    json.dumps(
        {
            "applied": "liger" in liger.forward.__func__.__module__,
            "same_tokens": found[-1].equal(expected[-1]),
            "difference": [
                (one - other).abs().max().item()
                for one, other in zip(found[:-1], expected[:-1], strict=True)
            ],
        }
    )
)
