"""The data of a script that is traced: loaded in its own process, in batches of the asked size."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from flatout.core.machine import Machine
from flatout.core.profile import Profile
from flatout.core.technique import Effect, Numerics, Technique
from flatout.workflow.worst_batches import WorstBatches, size_of
from flatout.workflow.worst_sample import worst_case


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HostData(Technique):
    """Load the data in this process, unpinned, and in batches of the size that is asked for."""

    batch: int | None = None
    said: list[str] = field(default_factory=list)
    """What was found while the loader was looked at, for the stream's notes."""
    sizes: list[int] = field(default_factory=list)
    """Samples in the data sets of the loaders, where they know it."""
    own: list[int] = field(default_factory=list)
    """Batch sizes that the script gave its loaders: what `batch` can be put in the place of."""

    family: ClassVar[str] = "data"
    addresses: ClassVar[frozenset[str]] = frozenset()
    numerics: ClassVar[Numerics] = Numerics.TRAINING

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["HostData"]:
        """Return nothing: this is no lever."""
        return ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Predict nothing: this is no lever."""
        return Effect()

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments without workers and pinning, for the worst batch there is."""
        from flatout.workflow.memory_subject import real_tensors

        wanted = {**arguments, "num_workers": 0, "pin_memory": False, "timeout": 0}
        with contextlib.suppress(TypeError, NotImplementedError):
            self.sizes.append(len(arguments["dataset"]))
        sampler = wanted.get("batch_sampler")
        size = wanted.get("batch_size") if sampler is None else size_of(sampler)
        if size is not None:
            self.own.append(size)
        if self.batch is not None and size is not None and sampler is not None:
            wanted["batch_sampler"] = WorstBatches(sampler, self.batch)
        elif self.batch is not None and size is not None:
            wanted["batch_size"] = self.batch
        with real_tensors():
            worst = worst_case(wanted, self.said.append)
        return {**wanted, **worst}
