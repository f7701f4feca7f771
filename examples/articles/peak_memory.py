"""Peak memory of a part of a training: reset before it, read after it. On a CPU the process's own
peak.

python examples/articles/peak_memory.py flatout measure train.py
"""

import resource

import torch

model = torch.nn.Linear(256, 256)
if torch.cuda.is_available():
    model.cuda()
    torch.cuda.reset_peak_memory_stats()  # before the section, not after it
model(torch.randn(512, 256, device=next(model.parameters()).device)).mean().backward()
if torch.cuda.is_available():
    peak = torch.cuda.max_memory_allocated()
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
print(f"result: a peak was read: {peak > 0}")
