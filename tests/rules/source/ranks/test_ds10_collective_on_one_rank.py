import pytest

from tests.rules.source.scenario import codes_in

HEAD = "import torch.distributed as dist\n"


@pytest.mark.parametrize(
    "test",
    ["rank == 0", "dist.get_rank() == 0", "args.rank == 0", "is_main_process()", "self.is_master"],
)
def test_a_collective_of_one_rank_is_found(test):
    assert codes_in(f"{HEAD}if {test}:\n    save()\n    dist.barrier()\n") == {"DS10": [4]}


@pytest.mark.parametrize(
    "text",
    [
        "if rank != 0:\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()\n",
        "if rank == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(y, 0)\n",
        "if rank == 0:\n    dist.all_reduce(x, group=first)\n",
        "if local_rank == 0:\n    dist.barrier()\n",
        "if world_size > 1:\n    dist.barrier()\n",
        "if rank == 0:\n    dist.send(x, 1)\n",
        "if rank == 0:\n    save()\ndist.barrier()\n",
        "def f():\n    if rank == 0:\n        dist.barrier()\n        return\n    dist.barrier()\n",
        "if rank == 0:\n    def later():\n        dist.barrier()\n",
    ],
)
def test_what_all_ranks_reach_is_left_alone(text):
    assert codes_in(HEAD + text) == {}


def test_a_collective_that_all_ranks_make_as_well_is_no_partner():
    text = "dist.barrier()\nif rank == 0:\n    save()\n    dist.barrier()\n"

    assert codes_in(HEAD + text) == {"DS10": [5]}
