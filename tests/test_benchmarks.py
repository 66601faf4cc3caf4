"""What the benchmarks put in place of a prompt that was read."""

import pytest
import torch
from conftest import random_ids, tiny_llama
from oracle import CACHE

from hf_dynyarn import patch_llama


@pytest.fixture
def our_cache(benchmarks):
    from common import our_cache

    return our_cache


@pytest.mark.parametrize("options", [{}, {"rotated_copy": False}, {"max_cache_len": 64}])
def test_a_made_up_cache_goes_on(our_cache, options):
    model = tiny_llama()
    patch_llama(model)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :7] = 0
    cache = our_cache(model, 40, batch=2, mask=mask, **options)
    with torch.no_grad():
        for tokens in (1, 20):
            model(random_ids(tokens).expand(2, -1), **{CACHE: cache})
    assert cache.positions[:, -1].tolist() == [60, 53]
