"""What all ranks of a training do alike, or not at all: each says whether it can, and one decides.

The chain of what a loader's workers do when they start: each technique's part, then the script's.

Words go through the store in which the ranks found each other. A collective would need a device,
which scripts may choose only after their loaders were made. The decision is written once and never
changed: a rank that is late finds that the others went on without it.

Find a collation of flatout's under those that were wrapped around it.
"""

import itertools
import json
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from flatout.records.errors import NotApplicable

WAIT_S = 60.0
"""How long the first rank waits for the others' words; ranks make their loaders at about the same
time, and a trial without any sign of training is ended after twice as long."""
POLL_S = 0.05
YES = "yes"
_numbers = itertools.count()
"""Of what was asked in this process; every rank asks in the order of its script."""


def group_size() -> int:
    """Return the ranks of the script's process group, 1 without one."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def agree(claim: str, trouble: str, *, ranks: int) -> None:
    """Return if every rank has no trouble and claims the same. To be called by all of them.

    Args:
        claim: What has to be the same on all ranks.
        trouble: Why this rank cannot; empty if it can.
        ranks: How many there are at least.

    Raises:
        NotApplicable: On all ranks, with what one of them said.
    """
    if group_size() < ranks:
        raise NotApplicable(
            f"{ranks} ranks have no process group in which they could agree; what one of them "
            f"decides by itself would mix their samples up{': ' if trouble else ''}{trouble}"
        )
    store, rank = _store_and_rank()
    about = f"flatout/agreed/{next(_numbers)}"
    store.set(f"{about}/{rank}", json.dumps([claim, trouble]))
    word = f"{about}/decision"
    if rank == 0:
        decision = _decide(store, [f"{about}/{other}" for other in range(group_size())])
    else:
        _wait(store, [word], 2 * WAIT_S)
        decision = f"rank 0 did not decide within {2 * WAIT_S:.0f} s"
    decision = store.compare_set(word, "", decision).decode()  # the first one counts
    if decision != YES:
        raise NotApplicable(decision)


def _decide(store: Any, keys: Sequence[str]) -> str:
    """Return `YES`, or what is in the way."""
    if not _wait(store, keys, WAIT_S):
        return f"not every rank asked for the same within {WAIT_S:.0f} s"
    said = [json.loads(store.get(key)) for key in keys]
    for rank, (_claim, trouble) in enumerate(said):
        if trouble:
            return f"rank {rank}: {trouble}"
    other = next((rank for rank, (claim, _) in enumerate(said) if claim != said[0][0]), None)
    return YES if other is None else f"rank {other} has other data than rank 0"


def _wait(store: Any, keys: Sequence[str], limit_s: float) -> bool:
    """Wait until all keys are there; False where they do not come."""
    until = time.monotonic() + limit_s
    while not store.check(list(keys)):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def _store_and_rank() -> tuple[Any, int]:
    from torch import distributed
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    if store is None:
        raise NotApplicable("the process group has no store in which its ranks could agree")
    return store, distributed.get_rank()


Collation = TypeVar("Collation")


def find_collation(collate: Any, kind: type[Collation]) -> Collation | None:
    """Return the outermost collation of a kind, None without one.

    Args:
        collate: A loader's `collate_fn`; what wraps another one holds it as `__wrapped__`.
        kind: Of the collation that is looked for.
    """
    while collate is not None and not isinstance(collate, kind):
        collate = getattr(collate, "__wrapped__", None)
    return collate


LinkT = TypeVar("LinkT")


def find_link(loader: Any, kind: type[LinkT]) -> LinkT | None:
    """Return the part of a kind in a loader's chain, None where it has none.

    Each part of ours is an object that has what comes after it as `then`.

    Look when an epoch begins, not when the loader is built: frameworks set a start of their own
    on a loader that has none yet (Lightning does, to seed its workers).
    """
    found = loader.worker_init_fn
    while found is not None and not isinstance(found, kind):
        found = getattr(found, "then", None)
    return found
