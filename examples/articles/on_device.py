"""Make a tensor where it is used. `tensor.rand` is no function of torch; torch.rand is.

python examples/articles/on_device.py flatout check --diff examples/articles/on_device.py
"""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
noise = torch.rand(2, 2, device=device)  # not torch.rand(2, 2).cuda()
like = torch.randn_like(noise)  # device and dtype of another tensor
print(f"result: made on the device: {noise.device.type == like.device.type == device.type}")
