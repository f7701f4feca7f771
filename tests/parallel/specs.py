"""What is trained, on 2, 4 and 8 ranks; imports no torch."""

from flatout.records.parallel import ParallelSpec

SPECS = {
    "ddp2": {"dp_replicate": 2},
    "zero1_2": {"dp_shard": 2, "zero": 1},
    "zero2_2": {"dp_shard": 2, "zero": 2},
    "zero3_2": {"dp_shard": 2, "zero": 3},
    "ddp2_accumulated": {"dp_replicate": 2, "microbatches": 2},
    "zero2_accumulated": {"dp_shard": 2, "zero": 2, "microbatches": 2},
    "zero3_checkpointing": {"dp_shard": 2, "zero": 3, "checkpointing": True},
    "tp2": {"tp": 2},
    "tp2_sequence": {"tp": 2, "sequence_parallel": True},
    "tp2_loss": {"tp": 2, "loss_parallel": True},
    "tp2_sequence_loss": {"tp": 2, "loss_parallel": True, "sequence_parallel": True},
    "tp2_checkpointing": {"tp": 2, "checkpointing": True, "microbatches": 2},
    "ddp2_compiled": {"dp_replicate": 2, "compile": True},
    "zero3_compiled": {"dp_shard": 2, "zero": 3, "compile": True},
    "tp2_compiled": {"tp": 2, "compile": True},
    "gpipe2": {"pp": 2, "schedule": "gpipe"},
    "1f1b2": {"pp": 2, "microbatches": 4},
    "interleaved2": {"pp": 2, "schedule": "interleaved"},
    "looped_bfs2": {"pp": 2, "schedule": "looped_bfs"},
    "zero_bubble2": {"pp": 2, "schedule": "zero_bubble"},
    "zbv2": {"pp": 2, "schedule": "zbv"},
    "dualpipe_v2": {"pp": 2, "schedule": "dualpipe_v"},
    "ddp4": {"dp_replicate": 4},
    "zero1_4": {"dp_shard": 4, "zero": 1},
    "zero3_4": {"dp_shard": 4, "zero": 3},
    "hsdp4": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    "tp4": {"tp": 4, "sequence_parallel": True},
    "dp2_tp2": {"dp_replicate": 2, "tp": 2},
    "zero3_tp2": {"dp_shard": 2, "zero": 3, "tp": 2, "sequence_parallel": True},
    "zero2_tp2_loss": {"dp_shard": 2, "zero": 2, "tp": 2, "loss_parallel": True},
    "1f1b4": {"pp": 4, "microbatches": 4},
    "pp2_dp2": {"pp": 2, "dp_replicate": 2, "microbatches": 2},
    "pp2_zero2": {"pp": 2, "dp_shard": 2, "zero": 2, "microbatches": 2, "schedule": "interleaved"},
    "pp2_zero3": {"pp": 2, "dp_shard": 2, "zero": 3, "microbatches": 2},
    "pp2_tp2": {"pp": 2, "tp": 2, "microbatches": 2},
    "pp2_tp2_sequence_loss": {
        "pp": 2,
        "tp": 2,
        "microbatches": 2,
        "sequence_parallel": True,
        "loss_parallel": True,
    },
    "hsdp2_tp2": {
        "dp_replicate": 2,
        "dp_shard": 2,
        "zero": 3,
        "tp": 2,
        "sequence_parallel": True,
    },
    "pp2_dp2_tp2": {"pp": 2, "dp_replicate": 2, "tp": 2, "microbatches": 2},
    "pp2_zero2_tp2": {
        "pp": 2,
        "dp_shard": 2,
        "zero": 2,
        "tp": 2,
        "microbatches": 2,
        "schedule": "interleaved",
        "checkpointing": True,
    },
}
"""What is trained, by the name of the test."""


def world_of(name):
    return ParallelSpec(**SPECS[name]).world_size
