"""Mixed precision as torch spells it today: torch.amp, the device named, bf16 where there is bf16.

`from torch.cuda.amp import autocast, GradScaler` warns, and does nothing without CUDA. A GradScaler
is for fp16 only.

    python examples/articles/mixed_precision.py
    flatout check --fix train.py                       # the spelling
    flatout tune --only bf16_autocast train.py         # whether it is faster and still correct
"""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
).to(device)
optimizer = torch.optim.AdamW(model.parameters())
dtype = torch.float16 if device == "cuda" and not torch.cuda.is_bf16_supported() else torch.bfloat16
scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
held = {}  # bytes kept for backward, in each mode


def kept(mode):
    def pack(tensor):
        is_weight = any(tensor.data_ptr() == p.data_ptr() for p in model.parameters())
        held[mode] = held.get(mode, 0) + (0 if is_weight else tensor.nbytes)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


for _ in range(20):
    inputs, labels = (
        torch.randn(512, 64, device=device),
        torch.randint(0, 10, (512,), device=device),
    )
    with kept("mixed"), torch.autocast(device, dtype=dtype):
        loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()  # missing as it is often printed: gradients of all steps add up
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with kept("fp32"):
        nn.functional.cross_entropy(model(inputs), labels)
share = held["mixed"] / held["fp32"]
print(
    f"result: less than two thirds of the activations' bytes: {share < 2 / 3}; "
    f"weights and optimizer state in fp32: {next(model.parameters()).dtype is torch.float32}"
)
