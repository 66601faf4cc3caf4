"""How a layer attends once queries and keys are rotated: one module for each way.

`attend(call, segment, first, query, key, value)` of a backend is a generator. It gets one segment
of queries, `(B, Hq, T, D)`, and the keys and values that these may see, `(B, Hkv, K, D)`, from key
`first` of the call on, and yields some of the queries at a time.
"""

import torch

# First key, output `(B, T, Hq, D)`, and weights `(B, Hq, T, K)` or None, of some of the queries.
Attended = tuple[int, torch.Tensor, torch.Tensor | None]
