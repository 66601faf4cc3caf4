r"""Dynamic YaRN in vLLM: a plug-in that vLLM finds by itself, in each of its processes.

A model asks for it in its own config, or by

    vllm serve MODEL --max-model-len N --hf-overrides \
        '{"rope_parameters": {"rope_type": "dynamic_yarn", "rope_theta": ...}}'

and all others are served as if the plug-in were not there. vLLM rotates keys before it caches
them; here they are cached un-rotated, and rotated where they are read, for the scale of each
query. What is cached then depends on the text before it alone, so that vLLM's prefix cache,
chunked prefill and continuous batching stay exact.

`plugin.py` is where vLLM calls in, `asked.py` which models ask and for what, `refusals.py` what is
refused, `metadata.py` sorts the queries of a step, `backend.py` is the attention, `kernels.py` what
decodes; `fused_metadata.py` and `fused_layer.py` do all three where there is Triton. `needs.py` is
what they stand on in vLLM.
"""
