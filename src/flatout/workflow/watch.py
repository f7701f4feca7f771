"""The command `watch`: look at a running job, at the GPUs and at the host, again and again."""

import contextlib
import datetime
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from flatout.hardware.counters import open_sources, readings_of, same_device
from flatout.hardware.gpus import Gpu, read_driver
from flatout.hardware.system import HostMeter
from flatout.launch.trial_folders import FOLDERS, find_job, is_alive, lives
from flatout.launch.trial_process import scratch_root
from flatout.records.errors import UserError
from flatout.records.input_files import read_json
from flatout.records.live import (
    ENDING,
    QUIET,
    STARTING,
    TRAINING,
    LiveGpu,
    LiveJob,
    LiveTrainer,
    LiveView,
)
from flatout.records.messages import words

EVERY_S = 1.0
"""Time between two looks; the drivers renew their utilisation about as often."""
FIRST_S = 0.5
"""Rates need two looks: a single view takes this long."""
QUIET_S = 10.0
QUIET_STEPS = 5.0
"""A job is quiet when its last step is longer ago than ten seconds and than five steps."""
RECORDS = "status-*.json"
COMPUTING = ("forward", "backward", "optimizer")
REASONS = {
    "busy_share": "not_timed",
    "samples_per_s": "no_samples",
    "loss": "no_loss",
    "step_ms": "no_step",
    "memory_bytes": "no_process",
}
"""Of each number that may be unknown: the message that says why it is."""


class Watcher:
    """Looks at one job, or at the newest one that runs, and at the machine. Close it at the end."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.facts = _named_job(folder) if folder else None
        self.host = HostMeter()
        self.sources = open_sources({})
        self.names = {gpu.uuid: gpu for gpu in read_driver().gpus} if self.sources.found else {}
        for source in self.sources.found:
            source.sample(is_full=False)  # activity is counted from one look to the next
        self.trained_in = ""
        """The folder of the job that was last seen training."""
        self.is_over = False
        """Whether the last look saw that the watched job's flatout has ended."""

    def look(self) -> LiveView:
        """Return what there is to see now."""
        # Asked once a look: the view that ends the watch is the one that says so.
        self.is_over = self.facts is not None and not lives(self.facts)
        job = self._job()
        if job is not None and job.trainers:
            self.trained_in = job.folder
        elif job is not None and job.folder == self.trained_in:
            job = replace(job, state=ENDING)
        return LiveView(
            at=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            job=job,
            gpus=self._gpus(job),
            host=self.host.read(),
            notes=tuple(self._notes(job)),
        )

    def close(self) -> None:
        """Leave the driver."""
        self.sources.close()

    def _job(self) -> LiveJob | None:
        if self.folder is not None:
            return read_job(self.folder)
        root = scratch_root()
        found = map(read_job, (folder for pattern in FOLDERS for folder in root.glob(pattern)))
        newest = min(filter(None, found), key=lambda job: job.elapsed_s, default=None)
        if newest is not None:
            # Trials of one measurement follow each other, each in a folder of its own.
            self.facts = find_job(Path(newest.folder)) or self.facts
        return newest

    def _notes(self, job: LiveJob | None) -> Iterator[str]:
        if self.is_over:
            yield words("watch.ended")
        elif job is None:
            yield words("watch.no_job" if self.facts is None else "watch.between")
        if self.sources.trouble:
            yield words("watch.no_gpu", why=self.sources.trouble)

    def _gpus(self, job: LiveJob | None) -> tuple[LiveGpu, ...]:
        used = [trainer.device_uuid for trainer in job.trainers] if job else []
        own = frozenset(trainer.pid for trainer in job.trainers) if job else frozenset[int]()
        found = []
        for number, source in enumerate(self.sources.found):
            sample = source.sample(is_full=True)
            readings = readings_of([sample], uuid=source.uuid, own_pids=own)
            gpu = self.names.get(source.uuid, Gpu(index=number, kind="", name="GPU"))
            is_of_job = any(same_device(source.uuid, uuid) for uuid in used)
            found.append(
                LiveGpu(index=gpu.index, name=gpu.name, readings=readings, is_of_job=is_of_job)
            )
        return tuple(found)


def look_once(folder: Path | None = None) -> LiveView:
    """Return a single view; it takes half a second, because rates need two looks.

    Raises:
        UserError: if the folder is not that of a running job.
    """
    with contextlib.closing(watch(folder)) as views:
        return next(views)


def watch(folder: Path | None, *, waits_for_jobs: bool = True) -> Generator[LiveView, None, None]:
    """Yield a view every second until the job has ended, of the newest one if no folder is named.

    Where no job runs it goes on until it is interrupted, or ends after one view.

    Raises:
        UserError: if the folder is not that of a running job.
    """
    watcher = Watcher(folder)
    try:
        time.sleep(FIRST_S)
        while True:
            yield watcher.look()
            if watcher.is_over or (watcher.facts is None and not waits_for_jobs):
                return
            time.sleep(EVERY_S)
    finally:
        watcher.close()


def read_job(folder: Path) -> LiveJob | None:
    """Return a running job as its folder tells it; None where it has ended."""
    facts = find_job(folder)
    if facts is None or not lives(facts):
        return None
    trainers = _trainers(folder)
    return LiveJob(
        folder=str(folder),
        kind=str(facts["kind"]),
        workload=str(facts["workload"]),
        pid=int(facts["owner"]),
        elapsed_s=max(0.0, time.time() - float(facts["began_at"])),
        state=_state(trainers),
        trainers=trainers,
    )


def _named_job(folder: Path) -> dict[str, Any]:
    facts = find_job(folder)
    if facts is None:
        raise UserError(
            f"{folder} is not the folder of a running job; 'flatout watch' without a folder finds "
            f"the newest one, and they are in {scratch_root()}"
        )
    if not lives(facts):
        raise UserError(f"the job of {folder} has ended: its flatout process is gone")
    return facts


def _trainers(folder: Path) -> tuple[LiveTrainer, ...]:
    """Return the training processes that live, by rank."""
    found = (_find_trainer(path) for path in folder.glob(RECORDS))
    return tuple(sorted(filter(None, found), key=lambda trainer: trainer.rank))


def _find_trainer(path: Path) -> LiveTrainer | None:
    """Return what one record tells; None where it was withdrawn, or its process was killed."""
    try:
        record = read_json(path)
        return _trainer(record) if is_alive(int(record["pid"])) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _trainer(record: Mapping[str, Any]) -> LiveTrainer:
    seconds, device = dict(record["seconds"]), record["device"]
    total_s = sum(seconds.values())
    shares = {name: value / total_s for name, value in seconds.items()} if total_s else {}
    is_cpu = device["kind"] == "cpu"
    over_s, steps = float(record["over_s"]), int(record["over_steps"])
    trainer = LiveTrainer(
        pid=int(record["pid"]),
        rank=int(record["rank"]),
        step=int(record["step"]),
        age_s=max(0.0, time.perf_counter() - float(record["at_s"])),
        step_ms=1e3 * over_s / steps if steps else None,
        samples_per_s=record["over_samples"] / over_s if record["over_samples"] else None,
        shares=shares,
        loss=record["loss"],
        loss_step=record["loss_step"],
        device_kind=str(device["kind"]),
        device_uuid=str(device.get("uuid", "")),
        memory_bytes=_resident_bytes(record["pid"]) if is_cpu else device["allocated_bytes"],
        busy_share=sum(shares.get(name, 0.0) for name in COMPUTING) if is_cpu else None,
    )
    unknown = {name: why for name, why in REASONS.items() if getattr(trainer, name) is None}
    return replace(trainer, missing={x: words(f"watch.{why}") for x, why in unknown.items()})


def _resident_bytes(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (OSError, psutil.Error):
        return None


def _state(trainers: Sequence[LiveTrainer]) -> str:
    if not trainers:
        return STARTING
    newest = min(trainers, key=lambda trainer: trainer.age_s)
    patience_s = max(QUIET_S, QUIET_STEPS * (newest.step_ms or 0.0) / 1e3)
    return QUIET if newest.age_s > patience_s else TRAINING
