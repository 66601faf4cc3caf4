"""Every tensor that we make names its device: a default device is nobody's but the user's."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from conftest import WINDOW, logits_of, random_ids
from families import CASES, STEP, tiny
from test_stock_rotation import ROPES, model_of
from transformers import LlamaForCausalLM

import hf_dynyarn
from hf_dynyarn import DynamicYaRNCache, patch_llama
from hf_dynyarn.versions import TRANSFORMERS

PACKAGE = Path(hf_dynyarn.__file__).parent
FACTORIES = ("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "tensor", "zeros")
FACTORIES += ("rand", "randint", "randn", "randperm")


def factory_calls(tree):
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name.removeprefix("torch.") in FACTORIES and name.startswith("torch."):
            yield node


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: file.stem)
def test_names_a_device(file):
    nameless = [
        f"{file.name}:{call.lineno}"
        for call in factory_calls(ast.parse(file.read_text()))
        if "device" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not nameless


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_patched_on_no_device(rope):
    """Inside `torch.device("meta")`, as big models are made."""
    twin = model_of(rope)
    with torch.device("meta"):
        model = LlamaForCausalLM(copy.deepcopy(twin.config))
        patch_llama(model)
    model.to_empty(device="cpu")
    model.load_state_dict(twin.state_dict())
    patch_llama(twin)
    ids = random_ids(WINDOW + 8)
    assert torch.equal(logits_of(model.eval(), ids), logits_of(twin, ids))


@pytest.fixture
def another_default():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def everything(model, path, ids):
    """Logits of calls that go through all of a cache."""
    cache = DynamicYaRNCache()
    results = [logits_of(model, ids[:, :20], cache), logits_of(model, ids[:, 20:], cache)]
    cache.crop(cache.get_seq_length() if TRANSFORMERS < (5, 20) else 0)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices([1, 0, 3])
    cache.reorder_cache(torch.tensor([2, 0, 1], device="cpu"))
    three = ids[:1, -1:].expand(3, -1)
    results.append(logits_of(model, three, copy.deepcopy(cache)))
    cache.save(path)
    results.append(logits_of(model, three, DynamicYaRNCache.load(path)))
    mask = torch.ones(2, 50, dtype=torch.long, device="cpu")
    mask[0, :9] = 0
    results.append(logits_of(model, ids, attention_mask=mask)[:, -1])
    positions = torch.tensor([[*range(24), *range(26)]] * 2, device="cpu")
    results.append(logits_of(model, ids, position_ids=positions, use_cache=False))
    results.append(logits_of(model, ids, DynamicYaRNCache(rotated_copy=False)))
    return results, cache.scales


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_a_default_device_other_than_the_models(rope, backend, tmp_path, request):
    model, ids = model_of(rope), random_ids(50, rows=2)
    model.set_attn_implementation(backend)
    patch_llama(model)
    expected, scales = everything(model, tmp_path / "cache", ids)
    request.getfixturevalue("another_default")
    patch_llama(model)
    results, again = everything(model, tmp_path / "cache", ids)
    assert again == scales
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", CASES)
def test_a_default_device_other_than_that_of_any_family(case, another_default):
    with torch.device("cpu"):
        model, stock, ids = tiny(case), tiny(case), random_ids(50)
        patch_llama(model, rescale_every=STEP)
        expected = logits_of(model, ids)
    patch_llama(model, rescale_every=STEP)
    try:
        ours = logits_of(model, ids)
    except (NotImplementedError, RuntimeError):  # from Gemma's own code, on transformers 4
        with pytest.raises((NotImplementedError, RuntimeError)):
            logits_of(stock, ids)
        return
    assert torch.equal(ours, expected)
