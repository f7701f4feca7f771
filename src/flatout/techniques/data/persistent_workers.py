"""Keep the loader's worker processes alive from one epoch to the next.

What it does: sets `persistent_workers=True` on the training loaders, and draws from the random
stream what a loader that starts again draws, so that the trainer's stream stays where it was. The
workers hear that seed and start their own streams with it, as new ones would. Where the script
changed the data set since the workers were started, they are started again; so they are where it
has an iterator with batches left when it asks for another one.
When it helps: epochs are short and starting the workers takes a visible part of them.
What it costs: the workers' memory stays in use between epochs.
How it is checked: samples, their order and the trainer's stream are bit-identical over epochs.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final
from weakref import WeakKeyDictionary

from flatout.data.proof.changes import find_change, state_of
from flatout.data.proof.dataset_facts import remembers
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, SourceForm, Technique, process_state

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from flatout.data.proof.random_streams import EpochStreams

START_MS = 310.0
FRESH_START_MS = 1250.0
"""Time until the first batch of an epoch with two forked workers, and with spawned ones (research
on the input pipeline, measured on 2 cores)."""
MIN_SHARE = 0.01
"""Below a hundredth of the epoch, the start of the workers is lost in the noise."""
BESIDE = "workers that live on would serve two iterators of the loader at once"
REMEMBERS = "the data set makes other samples once it made some, as where it keeps augmented ones"
OURS = "flatout."
"""How the names of modules begin that have techniques' collations."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentWorkers(Technique):
    """Keep the loader's workers alive between epochs."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    sets: ClassVar[tuple[str, ...]] = ("persistent_workers",)
    by_hand: ClassVar[str] = """
Where the training loader is made:
+ DataLoader(..., persistent_workers=True)
By hand this moves the random stream at every epoch's start; flatout's technique does not.
"""
    source: ClassVar[SourceForm | None] = SourceForm(loader={"persistent_workers": "True"})

    copied: "WeakKeyDictionary[DataLoader[Any], _Copied]" = process_state(WeakKeyDictionary)
    changes: list[str] = process_state(list)
    """Of each epoch but a loader's first: why its workers were started again; empty if not."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["PersistentWorkers"]:
        """Return the technique when workers are started again in epochs short enough to feel it."""
        if all(x.persistent_workers or not x.workers for x in profile.training_loaders):
            return ()
        saved_ms = start_per_step_ms(profile)
        return [cls()] if saved_ms >= MIN_SHARE * profile.step_ms.median else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Spread the start of the workers over the epoch's steps."""
        return Effect(
            step_ms=-start_per_step_ms(profile),
            why=f"workers start again every {profile.epoch_steps} steps",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask for workers that live on, unless the data set changes between epochs."""
        asked = arguments.get("persistent_workers")
        if isinstance(asked, _Added):
            return arguments  # a framework rebuilt a loader that already has the technique
        if asked:
            raise NotApplicable("the script asked for persistent workers itself")
        if not arguments.get("num_workers"):
            raise NotApplicable("the loader has no workers")
        _check_data_set(arguments["dataset"])
        return {**arguments, "persistent_workers": _Added(1)}

    def epoch(self, loader: Any) -> Any:
        """Draw the seed that a loader which starts its workers again would draw, or start them so.

        The workers have a copy of the data set: what the script changed since is not in it.
        """
        if not isinstance(loader.persistent_workers, _Added):
            raise NotApplicable("the loader's workers are as the script asked")
        streams = _streams_of(loader)
        now = _Copied(loader, streams)
        if loader._iterator is not None:
            before = self.copied.get(loader)
            self.changes.append(_keep_or_end(loader, streams, before, now))
        self.copied[loader] = now
        return loader

    def end(self) -> str:
        """Say in how many epochs the workers were started again after all."""
        changed = [change for change in self.changes if change]
        if not changed:
            return ""
        if len(changed) == len(self.changes):
            raise NotApplicable(
                f"{changed[0]} before each epoch: they were started again as always"
            )
        often = f"{len(changed)} of {len(self.changes)} later epochs"
        return f"{changed[0]}: they were started again in {often}"


class _Copied:
    """What workers have a copy of, as it was when they were started, or when last looked at."""

    def __init__(self, loader: "DataLoader[Any]", streams: "EpochStreams") -> None:
        from flatout.data.proof.random_streams import generators_of

        held = {"collate_fn": own_collation(loader.collate_fn), "worker_init_fn": streams.then}
        self.state = state_of(loader.dataset, **held)
        self.generators = generators_of(loader.dataset, **held)

    def find_change(self, now: "_Copied") -> str:
        """Return what the script did to it since, as a clause; empty if it did nothing."""
        from flatout.data.proof.random_streams import are_where_they_were

        name = find_change(self.state, now.state)
        if name is not None:
            return f"the script changes the data set between epochs: {name}"
        if not are_where_they_were(self.generators):
            return "the trainer draws from a generator that the data set holds"
        return ""


class _Added(int):
    """True, recognisable as ours even after a framework copied it into a loader of its own."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "True"

    def __reduce__(self) -> tuple[type[bool], tuple[bool]]:
        return bool, (True,)  # spawned workers need not import flatout


def _streams_of(loader: "DataLoader[Any]") -> "EpochStreams":
    """Return what starts the streams of a loader's workers, put there before its first epoch."""
    from flatout.data.images.substitution import find_link
    from flatout.data.proof.random_streams import EpochStreams, check_loader

    found = find_link(loader, EpochStreams)
    if found is None:
        check_loader(loader)
        found = loader.worker_init_fn = EpochStreams(loader.worker_init_fn)
        if remembers(loader.dataset, own_collation(loader.collate_fn)):
            found.memory = REMEMBERS
    return found


def own_collation(collate: Any) -> Any:
    """Return the script's own collation, below those that techniques wrapped around it."""
    while type(collate).__module__.startswith(OURS) and hasattr(collate, "__wrapped__"):
        collate = collate.__wrapped__
    return collate


def _keep_or_end(
    loader: "DataLoader[Any]", streams: "EpochStreams", before: _Copied | None, now: _Copied
) -> str:
    """Tell the workers the seed of new ones, or let new ones be started; return why, if so."""
    if is_held(loader) and is_given_out(loader._iterator):
        loader._iterator = successor_of(loader._iterator)
    elif is_held(loader):
        # Who draws from it has it still: its workers end with its batches, or when it goes.
        loader._iterator._persistent_workers = False  # type: ignore[union-attr]
        loader._iterator = None
        streams.forget()
        return BESIDE
    change = before.find_change(now) if before is not None else "as far as was seen"
    change = change or streams.trouble or streams.memory
    if change:
        end_workers(loader)
        streams.forget()
        return f"workers that live on would make other samples ({change})"
    streams.seed = draw_missing_seed(loader)
    return ""


class _Lone:
    """Holds a thing that no one else holds, as a loader its iterator."""

    def __init__(self) -> None:
        self._iterator = object()


def is_held(loader: Any) -> bool:
    """Return whether code other than a persistent loader holds its iterator.

    One that was left by `break` is held by its loader alone.
    """
    # How many references a lone one has differs between versions of Python.
    return _references(loader) > _references(_Lone())


def is_given_out(iterator: Any) -> bool:
    """Return whether all batches of an epoch were given out, though no one was told of its end.

    Lightning, and loops that count their batches, never ask for more.
    """
    return bool(iterator._rcvd_idx == iterator._send_idx and not iterator._tasks_outstanding)


def successor_of(iterator: Any) -> Any:
    """Return an iterator with the workers of one that gave out its batches.

    That one has nothing to give any more, whoever asks it, and no workers to end with it.
    """
    from torch.utils.data._utils import signal_handling as signals

    made = object.__new__(type(iterator))
    made.__dict__.update(iterator.__dict__)
    if iterator._worker_pids_set:
        pids = tuple(worker.pid for worker in made._workers)
        signals._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        signals._set_worker_pids(id(made), pids)  # type: ignore[attr-defined]
    iterator._shutdown, iterator._worker_pids_set = True, False
    iterator._workers = []
    return made


def _references(holder: Any) -> int:
    return sys.getrefcount(holder._iterator)


def draw_missing_seed(loader: "DataLoader[Any]") -> int:
    """Draw what a non-persistent loader draws at the start of an epoch and a persistent one omits.

    Returns the base seed of the workers, which one that starts again would give to them.

    A new iterator starts the index sampler once, draws the workers' base seed from the loader's
    generator (the trainer's own where it has none), and starts the sampler again. A persistent one
    only does the last. Call this right before each `for` over a persistent loader but the first.
    """
    import torch

    iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))


def end_workers(loader: "DataLoader[Any]") -> None:
    """End the workers of a persistent loader: its next epoch starts new ones, with the seed drawn.

    Call this right before a `for` over it where the data set was changed since the last one.
    """
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        loader._iterator = None


def _check_data_set(dataset: Any) -> None:
    from torch.utils import data

    if hasattr(dataset, "set_epoch"):
        raise NotApplicable(
            "the data set has set_epoch, and workers that live on would not see its calls"
        )
    if isinstance(dataset, getattr(data, "IterDataPipe", ())):
        raise NotApplicable("data pipes share a seed of their own at the start of every epoch")


def start_per_step_ms(profile: Profile) -> float:
    """Return the time of starting the workers, spread over the steps of an epoch.

    Where no second epoch was seen, the start is taken to cost `START_MS`, or `FRESH_START_MS`.
    """
    is_fresh = any(x.start_method not in ("", "fork") for x in profile.training_loaders)
    start_ms = profile.epoch_start_ms or (FRESH_START_MS if is_fresh else START_MS)
    return start_ms / profile.epoch_steps if profile.epoch_steps else 0.0


KOREAN = """
Keep the loader's workers alive between epochs.
    로더의 워커를 에폭 사이에도 살려 둡니다.
By hand this moves the random stream at every epoch's start; flatout's technique does not.
    손으로 바꾸면 에폭을 시작할 때마다 난수열이 움직이지만 flatout의 기법은 그렇지 않습니다.
workers that live on would serve two iterators of the loader at once
    살려 둔 워커가 로더의 이터레이터 둘을 동시에 맡게 됩니다
workers start again every {n} steps
    워커가 {n}스텝마다 다시 시작합니다
the script asked for persistent workers itself
    스크립트가 persistent_workers를 직접 요청했습니다
the loader's workers are as the script asked
    로더의 워커가 스크립트가 요청한 그대로입니다
{why} before each epoch: they were started again as always
    {why}. 에폭마다 워커를 여느 때처럼 다시 시작했습니다
workers that live on would make other samples ({why}) before each epoch: they were started again as
always
    살려 둔 워커가 다른 샘플을 만들게 되어({why}) 에폭마다 여느 때처럼 다시 시작했습니다
{why}: they were started again in {often}
    {why}. 워커를 {often}에서 다시 시작했습니다
workers that live on would make other samples ({why}): they were started again in {often}
    살려 둔 워커가 다른 샘플을 만들게 되어({why}) {often}에서 다시 시작했습니다
{n} of {all} later epochs
    이후 에폭 {all}개 중 {n}개
the script changes the data set between epochs: {name}
    스크립트가 에폭 사이에 데이터셋을 바꿉니다: {name}
the trainer draws from a generator that the data set holds
    데이터셋이 들고 있는 난수 생성기를 학습 쪽에서도 씁니다
the data set makes other samples once it made some, as where it keeps augmented ones
    데이터셋이 증강한 샘플을 보관하는 식으로, 샘플을 만들고 나면 다른 샘플을 만듭니다
as far as was seen
    관찰한 바로는
workers that live on would make other samples ({why})
    살려 둔 워커가 다른 샘플을 만들게 됩니다({why})
the data set has set_epoch, and workers that live on would not see its calls
    데이터셋에 set_epoch가 있는데 살려 둔 워커에는 그 호출이 전해지지 않습니다
data pipes share a seed of their own at the start of every epoch
    데이터 파이프는 에폭을 시작할 때마다 자체 시드를 나누어 가집니다
"""
