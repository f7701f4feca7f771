"""empty_cache() gives unused blocks back to the driver. It moves no tensor, so it does not undo
fragmentation inside them.

It costs a wait and new allocations. Against fragmentation let segments grow:
PYTORCH_ALLOC_CONF=expandable_segments:True.

    python examples/articles/empty_cache.py
    flatout tune --only empty_cache_steps,expandable_segments train.py
"""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
held = torch.zeros(1_000_000, device=device)
before = torch.cuda.memory_allocated()
torch.cuda.empty_cache()  # without CUDA it does nothing
after = torch.cuda.memory_allocated()
print(
    f"result: what tensors hold is not freed by it: {before == after and held.numel() == 1_000_000}"
)
