"""Batches made by threads of the training process: nothing is sent, pickled or copied.

Right for data sets whose work is done outside of Python's interpreter lock, such as `Cropped` and
packed samples of one shape: their batches are a few calls into torch and numpy. Samples that Python
code makes belong in a `DataLoader`'s worker processes.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from flatout.core.errors import UserError
from flatout.data.reader import collate
from flatout.hardware.limits import usable_cores

AHEAD = 1
"""Batches that wait beside those in the making."""


class BatchThreads:
    """An iterable of batches, in the order of its batch sampler.

        data = flatout.data.cropped(flatout.data.open(path), flatout.data.Crops(side=224))
        order = flatout.data.GlobalOrder(len(data), batch_size=256)
        loader = flatout.data.BatchThreads(data, order)
        for images, labels in order.follow(loader): ...

    Args:
        data: a data set that makes whole batches, `__getitems__`.
        batch_sampler: gives the numbers of each batch; one pass over it is an epoch.
        threads: how many batches are made side by side; 0 for as many as there are cores.
        ahead: finished batches that may wait for the loop.

    Raises:
        UserError: if the data set makes single samples only.
    """

    def __init__(
        self,
        data: Any,
        batch_sampler: Iterable[Sequence[int]],
        *,
        threads: int = 0,
        ahead: int = AHEAD,
    ) -> None:
        if not hasattr(type(data), "__getitems__"):
            raise UserError(
                f"{type(data).__name__} makes no whole batches (__getitems__); use torch's "
                "DataLoader, whose workers are processes"
            )
        if threads < 0 or ahead < 0:
            raise UserError(f"threads={threads} and ahead={ahead} must be at least 0")
        self.dataset, self.batch_sampler = data, batch_sampler
        self.threads, self.ahead = threads or usable_cores(), ahead

    def __len__(self) -> int:
        sized: Any = self.batch_sampler
        return len(sized)

    def __iter__(self) -> Iterator[Any]:
        """Give the batches of an epoch; what is under way when the loop breaks off is dropped."""
        pool = single_threads(self.threads)
        waiting: deque[Future[Any]] = deque()
        try:
            for indices in self.batch_sampler:
                waiting.append(pool.submit(_batch, self._task(indices)))
                if len(waiting) >= self.threads + self.ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            waiting.clear()
            pool.shutdown(wait=True, cancel_futures=True)

    def _task(self, indices: Sequence[int]) -> Callable[[], Any]:
        """Return what makes a batch; random numbers are drawn here, in the order of the batches."""
        prepare = getattr(self.dataset, "task", None)
        if prepare is not None:
            task: Callable[[], Any] = prepare(indices)
            return task
        return functools.partial(self.dataset.__getitems__, indices)


def _batch(task: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return collate(task())


def single_threads(count: int) -> ThreadPoolExecutor:
    """Return running threads in which torch's operations use no threads of their own.

    Torch keeps the number for each thread, and gives a new thread the one that was set last, by
    whichever: it is set back for those that others start later.
    """
    before = torch.get_num_threads()
    ready = threading.Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # else this thread's first operation sets it to the common number
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="flatout-batches", initializer=start)
    for _ in range(count):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(before)
    return pool
