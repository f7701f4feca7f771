"""Say where the training runs. num_workers does not move a model: a GPU that torch cannot see, or a
missing .to(device), does.

python examples/articles/device.py flatout doctor # why a training would run on the CPU,
and which GPUs it would not use
"""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torch.nn.Linear(4, 4).to(device)
batch = torch.randn(2, 4).to(
    device
)  # batches from a loader are on the CPU, with or without workers
where = {parameter.device.type for parameter in model.parameters()} | {batch.device.type}
print(
    f"result: model and batch are on one device: {where == {device.type}}; "
    f"torch was built {'with' if torch.version.cuda else 'without'} CUDA"
)
