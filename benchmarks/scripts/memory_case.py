"""Train three steps of one case and write what torch's allocator says: one process a case.

    python memory_case.py NAME BATCH RESULT.json SNAPSHOT.pickle [LIMIT_BYTES]

With a limit only that much of the device may be used, and whether the steps fit is the answer.
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).parent))

import memory_cases

STEPS = 3
MAX_ENTRIES = 1_000_000


def train(subject, batch, scaler=None, device="cuda"):
    """Train as the tracer does: the same calls in the same order."""
    device = torch.device(device)
    model = subject.model().to(device)  # made on the host, as the tracer does it
    model.train()
    optimizer = subject.optimizer(model)
    dtype = None if subject.autocast is None else getattr(torch, subject.autocast)
    for _ in range(STEPS):
        for _ in range(subject.accumulate):
            data = subject.batch(batch, device)
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = subject.loss(model, data)
            loss = loss / subject.accumulate if subject.accumulate > 1 else loss
            (loss if scaler is None else scaler.scale(loss)).backward()
            del loss
        update(subject, model, optimizer, scaler)
        optimizer.zero_grad(set_to_none=True)
    return model


def update(subject, model, optimizer, scaler):
    if subject.clip_norm is not None:
        clip_grad_norm_(model.parameters(), subject.clip_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def main(name, batch, result, snapshot, limit=0):
    subject = getattr(memory_cases, name)
    if limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
    else:
        torch.cuda.memory._record_memory_history(context=None, max_entries=MAX_ENTRIES)
    scaler = torch.amp.GradScaler("cuda") if subject.scales_gradients else None
    fits = True
    try:
        train(subject, batch, scaler)
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        fits = False
    free, total = torch.cuda.mem_get_info()
    found = {
        "fits": fits,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "outside": total - free - torch.cuda.memory_reserved(),
        "total": total,
    }
    if not limit:
        torch.cuda.memory._dump_snapshot(snapshot)
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:5], *map(int, sys.argv[5:6]))
