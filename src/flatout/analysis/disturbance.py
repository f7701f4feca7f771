"""Why a measurement must not be trusted: others on the cores or on the device, lowered clocks."""

from collections.abc import Mapping

from flatout.records.machine import Machine
from flatout.records.messages import named, words
from flatout.records.profile import Profile
from flatout.records.readings import GpuReadings
from flatout.records.units import format_share

DELAY_LIMIT = 0.05
"""Run-queue delay per second: undisturbed trials show at most 0.038, loaded ones 0.058 to 1.2."""
FOREIGN_LIMIT = 0.05
"""Share of the cores that others used; undisturbed trials show at most 0.028."""
FOREIGN_WITH_DELAY = 0.02
"""With a high delay, this much foreign work makes others the cause rather than the job itself."""
STEAL_LIMIT = 0.02
MIN_TICKS = 4
"""The kernel counts in ticks of 10 ms: fewer than this many are no evidence in a short window."""
TICK_S = 0.01
THROTTLE_LIMIT = 0.10
"""Share of the samples with lowered clocks. One sample of a short window is no evidence: drivers
show a slowdown for a moment when the load jumps. No source but that reasoning; not measured."""
SLOWDOWNS = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "power brake",
)
"""Reasons that mean something is wrong with cooling or supply. A power cap is how the product
works, and its clocks come again the next time: it is a note."""


def of_load(load: Mapping[str, float], profile: Profile, machine: Machine) -> tuple[str, ...]:
    """Return how other work on the cores spoilt a trial; empty where it did not.

    A high run-queue delay without foreign work is the job's own oversubscription (workers and
    threads share the cores): a property of the recipe, not a disturbance.
    """
    floor = MIN_TICKS * TICK_S / (load.get("wall_s", 1.0) * machine.usable_cores)
    foreign, steal = load.get("foreign_share", 0.0), load.get("steal_share", 0.0)
    delay = load.get("delay_share", 0.0)
    found = []
    if foreign > max(FOREIGN_LIMIT, floor):
        found.append(words("note.foreign", share=format_share(foreign)))
    if steal > max(STEAL_LIMIT, floor):
        found.append(words("note.steal", share=format_share(steal)))
    of_a_rank = sum(loader.workers for loader in profile.training_loaders) + profile.cpu_threads
    is_oversubscribed = of_a_rank * max(1, len(profile.ranks)) > machine.usable_cores
    is_delayed = not is_oversubscribed and delay > DELAY_LIMIT
    if not found and is_delayed and foreign > max(FOREIGN_WITH_DELAY, floor):
        found.append(words("note.delayed", delay=format_share(delay), share=format_share(foreign)))
    return tuple(found)


def of_device(readings: GpuReadings | None) -> tuple[str, ...]:
    """Return how the device itself spoilt a trial: lowered clocks, someone else's work."""
    if readings is None:
        return ()
    found = [
        words("note.clocks", share=format_share(share), name=slowdown(name))
        for name, share in readings.throttle_shares.items()
        if name in SLOWDOWNS and share >= THROTTLE_LIMIT
    ]
    working = readings.other_processes - readings.other_idle_processes
    if working == 1:
        found.append(words("note.other_gpu"))
    elif working > 1:
        found.append(words("note.other_gpus", n=str(working)))
    return tuple(found)


def slowdown(name: str) -> str:
    """Return the words for a reason of lowered clocks."""
    return named("slowdown", name.replace(" ", "_"))


def notes_on(readings: GpuReadings | None) -> tuple[str, ...]:
    """Return what is worth knowing about the device and spoils nothing."""
    if readings is None:
        return ()
    found = []
    capped = readings.throttle_shares.get("power cap", 0.0)
    if capped >= THROTTLE_LIMIT:
        found.append(words("note.power_limit", share=format_share(capped)))
    if readings.other_idle_processes:
        found.append(words("note.idle_others", n=str(readings.other_idle_processes)))
    return tuple(found)
