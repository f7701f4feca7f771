"""Scan the number of loader workers under the running training, where the step waits for data.

One untimed run visits the numbers one after the other. It only proposes: what it finds best is
tried as any other technique, in fresh pairs.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.analysis.feeding import (
    DEFAULT_PREFETCH,
    MEMORY_SHARE,
    MOST_PER_CORE,
    MOST_PER_CORE_BLOCKED,
    cores_of,
    fitting_prefetch,
    is_crowded,
    is_starved,
    loading,
    workers_now,
)
from flatout.records.catalogue import setter_of
from flatout.records.journey import WorkerPace, WorkerScan
from flatout.records.machine import Machine
from flatout.records.messages import joined, words
from flatout.records.profile import LoaderFacts, Profile
from flatout.records.recipe import Recipe
from flatout.records.technique import Numerics
from flatout.tuning.experiments import ENDLESS, Asking, TrialHistory, key_of
from flatout.tuning.passes import find_seen
from flatout.tuning.ranking import Search

WORKERS = ("num_workers", "persistent_workers")
"""Under techniques that set these a scan still holds: they are what it is about."""
MOST_S = 40.0
"""Time for the visits of one scan at most; seven numbers take half of it."""
LEAST_S = 10.0
"""With less time left, the techniques' own predictions have to do."""
TIME_SHARE, LATER_SHARE = 0.1, 0.05
"""Share of the time left that the first scan may take, and a later one: proofs need the rest."""
MOST_SCANS = 3
STILL_STARVED = 0.1
"""Share of the step that waits for data where another scan is worth its time."""
MOST_OVERTIME = 2.0
"""Times the scan's time that it may take where the script ends before all numbers were visited, and
is started again for the others."""
SHORT_EPOCH_S = 5.0
"""Epochs up to this length are visited whole: their start is much of a visit."""


@dataclass(slots=True, kw_only=True)
class WorkerScans:
    """The scans of one tuning: one at its start, and others once the loading was changed."""

    history: TrialHistory
    search: Search
    known: dict[str, WorkerScan | None] = field(default_factory=dict)
    """By the recipe without its workers."""
    latest: WorkerScan | None = None
    is_blocked: bool = False
    """Whether the unchanged loading waits for storage or a lock more than it computes."""

    def of(self, recipe: Recipe, profile: Profile, left_s: float) -> Asking[WorkerScan | None]:
        """Return the scan that holds under a recipe; None where no one looked."""
        if not self._is_wanted(profile):
            return None
        key = _key(recipe)
        max_s = min(MOST_S, (LATER_SHARE if self.known else TIME_SHARE) * left_s)
        if key not in self.known and max_s >= LEAST_S and self._is_due(profile):
            if not self.known:
                cores = cores_of(profile, self.history.machine)
                self.is_blocked = loading(profile, cores).is_blocked
            may_thread = self.search.allows(setter_of("threads"), Numerics.ROUNDING)
            self.known[key] = yield from scan(
                self.history, recipe, profile, max_s, may_thread=may_thread
            )
            self.latest = self.known[key]
        return self.known.get(key, self.latest)

    def _is_due(self, profile: Profile) -> bool:
        """Return whether another scan may show another number."""
        if not self.known:
            return True
        # Where making batches takes the cores of the training, a scan has shown that already.
        if profile.device_kind == "cpu" and not self.is_blocked:
            return False
        if len(self.known) >= MOST_SCANS or profile.share("data_wait") < STILL_STARVED:
            return False
        seen = self.latest
        # With the most workers of all there are no more to be had, whatever the step became.
        return seen is None or seen.best.num_workers < max(x.num_workers for x in seen.paces)

    def notes(self) -> list[str]:
        """Return a line about every scan."""
        return [describe(scan) for scan in self.known.values() if scan is not None]

    def _is_wanted(self, profile: Profile) -> bool:
        loaders = profile.training_loaders
        if len(profile.ranks) > 1 or len(loaders) != 1 or loaders[0].is_iterable:
            return False
        is_allowed = self.search.allows(setter_of("num_workers"), Numerics.EXACT)
        return is_allowed and (is_starved(profile) or is_crowded(profile))


def scan(
    history: TrialHistory,
    recipe: Recipe,
    profile: Profile,
    max_s: float,
    *,
    may_thread: bool = False,
) -> Asking[WorkerScan | None]:
    """Run the script, changing its number of workers on the way; None where that did not work.

    A script that ends too early is started again for the numbers that it was not seen with, the
    largest first. Each process has the present number, to which the others are ratios.

    `may_thread`: whether the training's threads may be changed, too.
    """
    fewer_threads = beside_fewer_threads(profile, history.machine) if may_thread else []
    numbers = [(*visit, 0) for visit in visits(profile, history.machine)]
    # The time may end before the last: more workers than cores are the least likely to help.
    cores = cores_of(profile, history.machine)
    first, *others = numbers
    few = [first, *(visit for visit in others if visit[0] <= cores)]
    epoch_ms = (profile.epoch_steps or math.inf) * profile.whole_step_ms
    options: dict[str, Any] = {
        "address": profile.training_loaders[0].address,
        "visits": [*few, *fewer_threads, *(visit for visit in numbers if visit not in few)],
        "max_s": max_s,
        "visits_all": profile.device_kind == "cpu",
        "whole_epochs": epoch_ms < 1e3 * SHORT_EPOCH_S,
        "room_bytes": MEMORY_SHARE * history.machine.memory_bytes,
    }
    present, found, used_s, last_s = options["visits"][0], [], 0.0, 0.0
    while used_s + last_s < MOST_OVERTIME * max_s:
        trial = yield from history.look(
            "numbers of workers", recipe, {"worker_scan": options}, ENDLESS
        )
        last_s = trial.wall_s
        used_s += last_s
        seen = find_seen(trial, "worker_scan")
        if not seen:
            break
        found.append(seen)
        left = [tuple(visit) for visit in seen.get("unvisited", ()) if tuple(visit) != present]
        numbers_seen = {(visit["num_workers"], visit["threads"]) for visit in seen["visits"]}
        if not left or len(numbers_seen) < 2:
            break
        options = options | {"visits": [present, *reversed(left)], "visits_all": True}
    return scan_of(together(found, workers_now(profile)), workers_now(profile)) if found else None


def together(found: Sequence[Mapping[str, Any]], now: int) -> Mapping[str, Any]:
    """Return the visits of several processes as of one, as fast as the first is at present."""
    first, *others = found
    visits = [*first["visits"]]
    for seen in others:
        paces = [
            [visit["batch_ms"] for visit in one["visits"] if _is_at(visit, now)]
            for one in (first, seen)
        ]
        if all(paces):
            factor = statistics.geometric_mean(paces[0]) / statistics.geometric_mean(paces[1])
            visits += [
                {**visit, "batch_ms": factor * visit["batch_ms"]}
                for visit in seen["visits"]
                if not _is_at(visit, now)
            ]
    left = found[-1].get("unvisited", ())
    numbers = ", ".join(str(number) for number in sorted({visit[0] for visit in left}))
    ended = words("scan.ended", numbers=numbers) if left else ""
    return {**first, "visits": visits, "stopped": found[-1]["stopped"] or ended}


def _is_at(visit: Mapping[str, Any], now: int) -> bool:
    return bool(visit["num_workers"] == now and not visit["threads"])


def visits(profile: Profile, machine: Machine) -> list[tuple[int, int]]:
    """Return the numbers to visit and their `prefetch_factor`: the present one, then doublings.

    Up to four a core: spinning threads of a training on the CPU leave theirs to whoever is many.
    Loading that waits more than it computes may need more, up to twice what hides it all.
    """
    (loader,) = profile.training_loaders
    now, cores = workers_now(profile), cores_of(profile, machine)
    rest_ms = max(profile.step_ms.median - profile.phases_ms["data_wait"], 1e-3)
    load = loading(profile, cores)
    all_of_it = load.total_ms / rest_ms
    most: float = MOST_PER_CORE * cores
    if load.is_blocked:
        most = max(most, min(MOST_PER_CORE_BLOCKED * cores, 2 * all_of_it))
    counts, number = [], 1
    while number <= most:
        # A fourth of what the step needs by its own profile cannot be the best.
        if number != now and 4 * number >= min(all_of_it, cores):
            counts.append(number)
        number *= 2
    return [(now, _prefetch(loader, now, machine)), *_fitting(counts, loader, machine)]


def beside_fewer_threads(profile: Profile, machine: Machine) -> list[tuple[int, int, int]]:
    """Return workers to visit while the training leaves them cores: theirs, prefetch, threads.

    Where making batches and training work on the same cores, each gets its part of them by what it
    has to do; twice the workers as well, since a worker that is ahead waits for the loop.
    """
    cores, threads = cores_of(profile, machine), profile.cpu_threads
    if profile.device_kind != "cpu" or min(cores, threads) < 2:
        return []
    (loader,) = profile.training_loaders
    load = loading(profile, cores)
    if load.is_blocked:
        return []  # workers that wait need no core
    rest_ms = max(profile.step_ms.median - profile.phases_ms["data_wait"], 1e-3)
    part = load.cpu_ms / (load.cpu_ms + rest_ms * min(threads, cores))
    workers = min(max(1, round(part * cores)), cores - 1)
    left = min(cores - workers, threads - 1)
    counts = [n for n in (workers, 2 * workers) if n != workers_now(profile)]
    return [(*visit, left) for visit in _fitting(counts, loader, machine)]


def _fitting(counts: list[int], loader: LoaderFacts, machine: Machine) -> list[tuple[int, int]]:
    found = [(number, _prefetch(loader, number, machine)) for number in counts]
    return [(number, prefetch) for number, prefetch in found if prefetch]


def _prefetch(loader: LoaderFacts, workers: int, machine: Machine) -> int:
    if not workers:
        return 0
    asked = loader.prefetch_factor or DEFAULT_PREFETCH
    return fitting_prefetch([loader], workers, asked, machine.shm_free_bytes)


def scan_of(seen: Mapping[str, Any], now: int) -> WorkerScan | None:
    """Return the scan from the probe's visits; None where the present number was not seen."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for visit in seen["visits"]:
        groups.setdefault((visit["threads"], visit["num_workers"]), []).append(visit)
    if (0, now) not in groups or len(groups) < 2:
        return None
    paces = [_pace(groups[key]) for key in sorted(groups)]
    return WorkerScan(
        now=now,
        paces=tuple(pace for pace in paces if not pace.threads),
        with_threads=tuple(pace for pace in paces if pace.threads),
        epoch_batches=seen["epoch_batches"],
        stopped=seen["stopped"],
    )


def _pace(group: Sequence[Mapping[str, Any]]) -> WorkerPace:
    return WorkerPace(
        num_workers=group[0]["num_workers"],
        threads=group[0]["threads"],
        prefetch_factor=group[0]["prefetch_factor"],
        batch_ms=tuple(visit["batch_ms"] for visit in group),
        start_ms=min(visit["start_ms"] for visit in group),
    )


def describe(scan: WorkerScan) -> str:
    """Say what was seen, as ratios to the present number of workers."""
    paces = [pace for pace in scan.paces if pace.num_workers != scan.now]
    shown = _gains(scan, paces)
    if scan.with_threads:
        threads, more = str(scan.with_threads[0].threads), _gains(scan, scan.with_threads)
        shown = words("scan.with_threads", shown=shown, threads=threads, more=more)
    best = scan.best_pair or scan.best
    name = "proposed_threads" if best.threads else "proposed"
    said = words(
        f"scan.{'none_better' if best.num_workers == scan.now else name}",
        shown=shown,
        n=str(scan.now),
        best=str(best.num_workers),
        threads=str(best.threads),
    )
    return joined(said, scan.stopped) if scan.stopped else said


def _gains(scan: WorkerScan, paces: Iterable[WorkerPace]) -> str:
    return ", ".join(f"{pace.num_workers}: {scan.gain(pace):.2f}x" for pace in paces)


def _key(recipe: Recipe) -> str:
    for name in map(setter_of, WORKERS):
        recipe = recipe.without(name)
    return key_of(recipe)
