"""One of the ranks that test_neighbours.py starts: generates with its half of the heads.

Usage: torchrun --nproc_per_node 2 side_tensor_parallel.py MODEL_FOLDER OUT_FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from conftest import generate, logits_of, random_ids
from transformers import AutoModelForCausalLM

from hf_dynyarn import DynamicYaRNCache, patch_llama

try:
    from transformers.distributed import DistributedConfig

    PARALLEL = {"distributed_config": DistributedConfig(tp_plan="auto")}
except (ImportError, TypeError):  # before transformers 5.9
    PARALLEL = {"tp_plan": "auto"}

source, out = map(Path, sys.argv[1:])
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = AutoModelForCausalLM.from_pretrained(source, **PARALLEL).eval()
patch_llama(model, rescale_every=7)
prompt, cache = random_ids(40), DynamicYaRNCache()
tokens = generate(model, prompt, cache)
found = {
    "tokens": tokens.tolist(),
    "logits": logits_of(model, prompt, use_cache=False).tolist(),
    "heads": cache.layers[0].keys.shape[1],
}
(out / f"rank{rank}.json").write_text(json.dumps(found))
torch.distributed.barrier()  # neither leaves while the other is still at work: gloo would abort
torch.distributed.destroy_process_group()
