"""One rank of two: puts block_order into a loader, and tells the samples that it draws.

Arguments: rank, file in which the ranks meet, packed store, share of it that is in memory here,
file to write.
"""

import json
import sys
from pathlib import Path

from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler

import flatout.data
from flatout.data import packed_store
from flatout.records.errors import NotApplicable
from flatout.techniques.data.block_order import BlockOrder

rank, meeting, store, resident, out = sys.argv[1:]
packed_store.resident_share = lambda _paths: float(resident)
distributed.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2
)
data = flatout.data.open(store)
sampler = DistributedSampler(data, shuffle=True, seed=5)
arguments = {"dataset": data, "batch_size": 50, "sampler": sampler, "shuffle": False}
refusal = ""
try:
    arguments = BlockOrder().loader(arguments)
except NotApplicable as reason:
    refusal = str(reason)
drawn = [number for batch in DataLoader(**arguments) for number in batch["x"].tolist()]
Path(out).write_text(json.dumps({"drawn": drawn, "refusal": refusal}), encoding="utf-8")
distributed.destroy_process_group()
