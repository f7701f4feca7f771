"""What a training's loop does to parameters and gradients, alone and under DeepSpeed's ZeRO.

Prints the losses and gradient norms of both as JSON. Only `forward`, `backward` and `step` are
DeepSpeed's; the other lines are those of a script that knows nothing of it.
"""

import json
import logging
import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

habit, stage = sys.argv[1], int(sys.argv[2])
deepspeed.ops.__compatible_ops__.clear()  # what it would compile, a shared memory for gloo
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
dist.init_process_group("gloo")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.often, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x, is_whole):
        x = torch.tanh(self.first(x))
        return self.last(x + self.often(x) if is_whole else x)


def train(engine_of):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    call, backward, step = engine_of(model, optimizer)
    losses, norms = [], []
    for number, x in enumerate(torch.randn(6, 16, 8)):
        optimizer.zero_grad()
        loss = call(x, habit != "rest" or number not in (2, 3)).square().mean() * 10
        losses.append(loss.item())
        backward(loss)
        if habit == "clip":
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        step()
        if habit == "write" and number == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
    return {"losses": losses, "norms": norms}


def alone(model, optimizer):
    return model, torch.Tensor.backward, optimizer.step


def under_deepspeed(model, optimizer):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine, engine.backward, engine.step


print("FOUND", json.dumps({"alone": train(alone), "deepspeed": train(under_deepspeed)}))
