"""Put hook points, recipe and recorders together once the script's process imports torch."""

import atexit
import contextlib
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.agent import undo_journal
from flatout.agent.events import TRAINED
from flatout.agent.hooks import collectives, loader, model, optimizer, step
from flatout.agent.session import Session
from flatout.agent.status import Publisher
from flatout.records import catalogue
from flatout.records.technique import name_of
from flatout.records.trial_spec import TrialSpec

if TYPE_CHECKING:
    from flatout.agent.recorder import Recorder

GUARD_RECORD = "guard.json"
"""Name of the guard's record in a trial's folder; that of the first rank, where there are more."""
GUARD_RECORDS = "guard*.json"
"""Those of all ranks."""


def install(spec: TrialSpec) -> Session:
    """Install everything the trial's specification asks for; called by the boot."""
    session = Session(spec, catalogue.build(spec.recipe))
    _seed(spec.seed)
    if spec.undo:
        undo_journal.announce_torch_save()
    if spec.guard is not None:
        _pin(spec.guard)
    session.start()
    folder = spec.status_folder or spec.folder
    if folder:  # `flatout watch` sees how the training goes
        session.quietly(lambda: Publisher(session, Path(folder)).install())()
    for hook_point in (loader, model, optimizer, step):
        hook_point.install(session)
    if spec.mode == "run":
        atexit.register(_tell_not_applied, session)
        _watch_memory(session, spec.status_folder, spec.plan)
        return session
    from flatout.agent.measuring.attention import AttentionMeter
    from flatout.agent.recorder import Recorder

    AttentionMeter(session).install()
    collectives.install(session)
    recorder = Recorder(session)
    if spec.guard is not None:
        _record_for_guard(session, spec.guard, Path(spec.folder) / GUARD_RECORD)
    recorder.install()
    _watch_memory(session, spec.folder)
    _start_probes(session, recorder, spec.probes)
    return session


def _record_for_guard(session: Session, guard: Mapping[str, Any], path: Path) -> None:
    from flatout.agent.guard.activity import ActivityRecorder
    from flatout.agent.guard.pinning import round_once
    from flatout.agent.guard.recorder import GuardRecorder

    if guard.get("rounds") or guard.get("nudges"):
        round_once(session, to_bf16=not guard.get("nudges"))
    if guard.get("activity"):
        ActivityRecorder(session, path)
    else:
        GuardRecorder(session, guard, path)


def _watch_memory(session: Session, folder: str, plan: Mapping[str, Any] | None = None) -> None:
    """Be ready to say what held the memory, should there be no more of it."""

    def begin() -> None:
        from flatout.agent.measuring.memory_watch import MemoryWatch

        MemoryWatch(session, Path(folder), plan).install()

    session.quietly(begin)()


def _start_probes(session: Session, recorder: "Recorder", wanted: Mapping[str, Any]) -> None:
    from flatout.agent import probes

    def start(name: str, options: Mapping[str, Any]) -> None:
        recorder.probes[name] = probes.start(name, session, options)

    for name, options in wanted.items():
        session.quietly(start)(name, options)


def _tell_not_applied(session: Session) -> None:
    """Say on stderr which techniques of the recipe did nothing; silence would be a false promise.

    And what those that acted found at their end: samples that changed, an order that was counted.

    Only where training steps were made: spawned loader workers import torch and end here too.
    """
    if not session.is_mine() or not (session.counts or session.trains_elsewhere):
        return
    with contextlib.suppress(OSError):
        Path(session.spec.status_folder, f"{TRAINED}-{os.getpid()}.json").touch()
    session.conclude()
    says = session.spec.says
    if session.trains_unseen and session.techniques:
        sys.stderr.write(f"flatout: {says['several_models']}\n")
    for technique in session.techniques:
        name = name_of(technique)
        status, why = session.status.get(name, ("unseen", "its hook point was never reached"))
        if status != "applied":
            about = {"status": says[f"status_{status}"], "why": session.spec.translated(why)}
            sys.stderr.write(f"flatout: {says['not_applied'].format(technique=name, **about)}\n")
        elif why:
            sys.stderr.write(f"flatout: {name}: {session.spec.translated(why)}\n")


def _seed(seed: int | None) -> None:
    """Give every trial the same streams; a script that seeds itself overrides this."""
    if seed is None:
        return
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _pin(guard: Mapping[str, Any]) -> None:
    """Take away the randomness that a technique may move legitimately, on both sides."""
    from flatout.agent.guard import pinning

    pinning.pin_samples(guard["seed"])
    if guard.get("draws", True):
        pinning.keep_random_compile()
    pinning.pin_algorithms()
    if guard["drops_dropout"]:
        pinning.drop_dropout()
    if guard["drops_autocast"]:
        pinning.drop_autocast()
