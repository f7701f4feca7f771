"""M = P x D_param + B x A x D_act + O x D_opt, against what a step holds: the gradients are missing
in it.

python examples/articles/memory_model.py flatout plan --gpu a100-40 --fit train.py # the same by
component, with the allocator's part
"""

import torch
from torch import nn

BATCH = 32
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
saved = {}  # address -> bytes of what forward keeps for backward


def pack(tensor):
    saved[tensor.data_ptr()] = tensor.nbytes
    return tensor


with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    loss = model(torch.randn(BATCH, 64)).square().mean()
loss.backward()
optimizer.step()

P = sum(p.numel() for p in model.parameters())
weights = {p.data_ptr() for p in model.parameters()}
activations = sum(size for address, size in saved.items() if address not in weights)
A = activations // (BATCH * 4)
state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()]
O_ = sum(t.numel() for t in state)
predicted = P * 4 + BATCH * A * 4 + O_ * 4
gradients = sum(p.grad.nbytes for p in model.parameters())
measured = P * 4 + activations + sum(t.nbytes for t in state) + gradients
print(
    f"result: O = 2P for AdamW: {O_ == 2 * P}; "
    f"the formula lacks the gradients' bytes alone: {measured - predicted == gradients == P * 4}"
)
