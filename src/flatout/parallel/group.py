"""The process group of a training that flatout spreads over ranks; the script knows nothing of it.

Launchers name a rank in environment variables. Once the group is there they are taken away, so that
the script, Accelerate and Transformers take themselves to be alone and do not spread anything too.
"""

import atexit
import datetime
import functools
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from flatout.agent import patching

LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun sets; variables that begin with TORCHELASTIC_ are taken away too."""
WAIT = datetime.timedelta(minutes=10)
"""How long a rank waits for the others in one exchange: evaluation and saving take a while."""
LET_GO_S = 0.2
"""What gloo's threads get to let go of the last exchange's tensors, which takes microseconds."""
NAMED_S = 5.0
"""How long a rank that lost another one waits to be ended: the other one has the reason, and
torchrun names the first that it sees gone."""
LOST = (
    "another rank has ended. If none has failed, the script stopped early there: it decides by "
    "numbers that differ between ranks, as what it counts over the samples of the training loader"
)
FAILED = 2
"""Exit code of a rank that cannot go on without training something wrong."""
MAX_SEED = 2**32
"""Seeds that numpy takes are below."""


def stop(reason: str) -> NoReturn:
    """End this rank, and with it the training: an exception may be caught, and the others train on.

    The reason says what is in the way and what to do.
    """
    sys.stdout.flush()
    sys.stderr.write(f"flatout: rank {dist.get_rank() if dist.is_initialized() else 0}: {reason}\n")
    sys.stderr.flush()
    os._exit(FAILED)


def say(text: str) -> None:
    """Say something from rank 0 alone."""
    if dist.get_rank() == 0:
        sys.stderr.write(f"flatout: {text}\n")


@functools.cache
def say_once(text: str) -> None:
    """Say something from rank 0, the first time that it is to be said."""
    say(text)


def join(ranks: int, *, uses_host: bool = False) -> bool:
    """Enter the group that the environment describes, and seed all ranks alike.

    Return whether this process is a rank: launchers, loader workers and other children are none.
    `uses_host`: whether ranks with GPUs exchange tensors of the host's memory too.
    """
    if "RANK" not in os.environ or "MASTER_PORT" not in os.environ:
        return False
    size = int(os.environ["WORLD_SIZE"])
    if size != ranks:
        stop(f"the recipe is for {ranks} ranks and {size} were started: give --ranks {ranks}")
    backend = "gloo"
    if torch.cuda.is_available():
        if not dist.is_nccl_available():
            stop("this build of torch has no NCCL, which several GPUs need")
        backend = "cpu:gloo,cuda:nccl" if uses_host else "nccl"
        device = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(min(device, torch.cuda.device_count() - 1))
    try:
        dist.init_process_group(backend, timeout=WAIT)
    except (RuntimeError, ValueError) as error:
        stop(f"the ranks found no way to each other: {error}")
    atexit.register(_leave)
    for name in list(os.environ):
        if name in LAUNCH_VARIABLES or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    patching.wrap(dist, "init_process_group", _refuse_second)
    patching.wrap(sys, "excepthook", _let_another_be_named)
    seed = torch.tensor([int.from_bytes(os.urandom(4), "little")], device=device_of_group())
    dist.broadcast(seed, 0)
    seed_all(int(seed))
    return True


def is_about_another(error: Exception) -> bool:
    """Return whether an exchange failed since another rank is gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def differs(values: Sequence[torch.Tensor], close: float = 0.0) -> bool:
    """Return whether numbers of this rank are others than rank 0's; every rank has as many.

    `close`: the difference up to which they are not.
    """
    if not values:
        return False
    own = torch.cat([one.reshape(-1) for one in values]).to(device_of_group(), torch.float64)
    own = own.nan_to_num()
    first = own.clone()
    dist.broadcast(first, 0)
    return bool(((own - first).abs() > close).any())


def device_of_group() -> torch.device:
    """Return the device whose tensors the group exchanges."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % MAX_SEED)
    torch.manual_seed(seed)


def _leave() -> None:
    """Leave the group at the end of the process, once gloo's threads have let go of the tensors.

    One of them may still hold the tensors of the last exchange, which a wrapped model keeps alive
    past `destroy_process_group`. Dropping a tensor takes the interpreter's lock: while Python
    finalizes, asking for it ends the thread, and inside a destructor the whole process
    ("terminate called without an active exception").
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(LET_GO_S)


def _let_another_be_named(report: Callable[..., Any]) -> Callable[..., Any]:
    """Say nothing for a while of an exchange that failed since another rank is gone."""

    def wait(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and is_about_another(error):
            time.sleep(NAMED_S)
        report(kind, error, trace)

    return wait


def _refuse_second(_original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        stop(
            "the script starts its own process group: start it as it is meant to be, with "
            "'flatout run --with recipe.toml -m torch.distributed.run ...', without --ranks"
        )

    return refuse
