"""torch's own attention in place of BetterTransformer, which is no longer developed: the same
result, no table of scores.

python examples/articles/attention.py flatout tune --only sdpa_attention,attention_backend train.py
"""

import torch
from torch.nn import functional

torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 256, 32, requires_grad=True).unbind(0)


def by_hand(q, k, v):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def kept(call):
    sizes = []

    def pack(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    return result, sum(sizes)


slow, much = kept(lambda: by_hand(q, k, v))
fast, little = kept(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
print(
    f"result: the same attention: {torch.allclose(slow, fast, atol=1e-5)}; "
    f"less than half is kept for backward: {little < much / 2}"
)
