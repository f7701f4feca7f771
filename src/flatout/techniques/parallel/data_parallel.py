"""Train on several GPUs or processes, each with its part of every batch.

What it does: starts from a script for one device. Every rank runs it, gets its part of each batch
of the training loader, and the gradients are averaged (DDP, or FSDP2 with the model sharded).
When it helps: a step takes far longer than sending the gradients.
What it costs: small steps, few samples a rank, loaders that are what the training waits for.
How it is checked: losses and weights of one process with the same global batch, in the tests; the
ranks' parameters are compared with each other while it trains.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.analysis import stream_changes
from flatout.parallel.cost import offload_s
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.memory_stream import Component, MemoryStream
from flatout.records.profile import Profile
from flatout.records.technique import Effect, MemoryOption, Numerics, PlannedDevice, Technique

if TYPE_CHECKING:
    from flatout.parallel.training import ParallelTraining

ONLY_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any that is free: nothing else has to know it
}
ALL_ELSEWHERE = 1 << 62
"""Shards of which a device keeps none: what is offloaded, in the model of sharded memory."""
ZERO_STAGES = (0, 2, 3)
"""ZeRO-1 needs another optimizer class than the script's; stage 2 saves more at the same cost."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel(Technique):
    """Share each batch out over ranks that train one model."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    sets: ClassVar[tuple[str, ...]] = ("ranks", "zero")
    by_hand: ClassVar[str] = """
Start the script with torchrun --nproc-per-node $ranks, and in it:
+ torch.distributed.init_process_group()
+ model = torch.nn.parallel.DistributedDataParallel(model)
+ sampler = torch.utils.data.DistributedSampler(dataset)
Give the loader that sampler and a batch size divided by $ranks.
Call sampler.set_epoch(epoch) in each epoch, and print and save on rank 0 only.
"""

    ranks: int = 2
    """Processes that train, one for each GPU."""
    zero: int = 0
    """0: a whole model on every rank; 2: gradients and optimizer states sharded; 3: weights too."""
    shard: int = 0
    """Ranks that share one copy of the model, for `zero` 2 and 3; 0 for all of them."""
    offload: bool = False
    """Whether weights, gradients and optimizer states wait in the host's memory, for `zero` 3."""
    acting: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """What acts in this process: empty, or the one training."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks}: a training has at least one")
        if self.zero not in ZERO_STAGES:
            raise ValueError(f"zero={self.zero}: give 0, 2 or 3")
        if self.shard and (self.zero == 0 or self.ranks % self.shard):
            raise ValueError(
                f"shard={self.shard}: needs zero 2 or 3, and has to divide {self.ranks} ranks"
            )
        if self.offload and self.zero != 3:
            raise ValueError(f"offload: keeps on the host what zero=3 shards, not zero={self.zero}")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["DataParallel"]:
        """Return nothing: how many ranks a training gets is the user's decision."""
        return ()

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what offloading makes of a traced step that one GPU is too small for."""
        return [
            MemoryOption(
                why="weights, gradients and optimizer states in the host's memory",
                settings={"ranks": 1, "zero": 3, "offload": True},
                change=partial(stream_changes.sharded, stage=3, shards=ALL_ELSEWHERE),
                cost=offload_cost,
                helps=lambda stream, device: (
                    device.ranks == 1 and not stream_changes.holds_shards(stream)
                ),
                group="update",  # as optimizer_in_backward: the two are not tried together
                is_traceable=False,
                is_last=True,
            )
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the step divided by the ranks; what they send each other is not in a profile."""
        saved_ms = profile.step_ms.median * (1 - 1 / self.ranks)
        return Effect(step_ms=-saved_ms, why=f"each rank has 1/{self.ranks} of a batch, at best")

    def environment(self, variables: Mapping[str, str]) -> Mapping[str, str]:
        """Make a rank of the process that offloads alone: no launcher starts it."""
        return {**variables, **ONLY_RANK} if self.ranks == 1 and self.offload else variables

    def start(self) -> None:
        """Join the other ranks, where this process is one."""
        from flatout.parallel.training import ParallelTraining

        training = ParallelTraining.join(
            self.ranks, zero=self.zero, shard=self.shard, offloads=self.offload
        )
        if training is not None:
            self.acting.append(training)

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give the workers of each rank random streams of their own."""
        found: Mapping[str, Any] = self._training.loader(arguments)
        return found

    def epoch(self, loader: Any) -> Any:
        """Share out the batches of a loader that feeds the training."""
        self._training.epoch(loader)
        return loader

    def batches(self, batches: Iterator[Any], loader: Any) -> Iterator[Any]:
        """Note of each batch how it was shared out."""
        found: Iterator[Any] = self._training.batches(batches, loader)
        return found

    def model(self, root: Any) -> Any:
        """Keep the model alike on all ranks."""
        self._training.model(root)
        return root

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Share out the inputs of a script that has no loader."""
        return self._training.forward(call, root)

    def backward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Average the gradients over the ranks, weighted by the samples of each."""
        return self._training.backward(call)

    def optimizer(self, optimizer: Any) -> Any:
        """Let the optimizer step on what this rank has, and compare the ranks now and then."""
        self._training.optimizer(optimizer)
        return optimizer

    @property
    def _training(self) -> "ParallelTraining":
        if not self.acting:
            raise NotApplicable("this process is no rank: start it with --ranks or --gpus")
        found: ParallelTraining = self.acting[0]
        return found


def offload_cost(stream: MemoryStream, device: PlannedDevice) -> float:
    """Return the step's time with parameters and the optimizer's step on the host, over without."""
    size = sum(a.size for a in stream.allocations if a.component is Component.PARAMETERS)
    step_s = device.step_s(stream)
    return 1 + offload_s(size, device.host_bandwidth) / step_s if step_s else 1.0


KOREAN = """
Share each batch out over ranks that train one model.
    한 모델을 학습하는 랭크들에 배치를 나누어 줍니다.
Start the script with torchrun --nproc-per-node {ranks}, and in it:
    스크립트를 torchrun --nproc-per-node {ranks}(으)로 시작하고, 그 안에서:
Give the loader that sampler and a batch size divided by {ranks}.
    로더에 그 샘플러와 {ranks}(으)로 나눈 배치 크기를 줍니다.
Call sampler.set_epoch(epoch) in each epoch, and print and save on rank 0 only.
    에폭마다 sampler.set_epoch(epoch)를 부르고, 출력과 저장은 랭크 0에서만 합니다.
weights, gradients and optimizer states in the host's memory
    가중치, 그래디언트, 옵티마이저 상태를 호스트 메모리에 둡니다
each rank has 1/{n} of a batch, at best
    잘 나뉘면 랭크마다 배치의 1/{n}을 맡습니다
this process is no rank: start it with --ranks or --gpus
    이 프로세스는 랭크가 아닙니다. --ranks나 --gpus로 시작하세요
ranks={n}: a training has at least one
    ranks={n}: 학습에는 랭크가 적어도 하나 있어야 합니다
zero={zero}: give 0, 2 or 3
    zero={zero}: 0, 2, 3 중에서 주세요
shard={shard}: needs zero 2 or 3, and has to divide {ranks} ranks
    shard={shard}: zero 2나 3이 필요하고, 랭크 {ranks}개를 나누어떨어지게 해야 합니다
offload: keeps on the host what zero=3 shards, not zero={zero}
    offload: zero=3이 나누는 것을 호스트에 두므로 zero={zero}(으)로는 쓸 수 없습니다
"""
