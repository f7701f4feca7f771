"""What the host gives this process: cores, memory, shared memory, files, disk."""

from pathlib import Path

from flatout.core.check import BAD, OK, WARN, Check
from flatout.core.machine import Machine
from flatout.core.units import GIB, MIB, format_bytes, format_share
from flatout.hardware.load import Load
from flatout.hardware.system import disk_speed

ROOMY_SHM_BYTES = 1 * GIB
"""Four workers, two batches each of 256 images at 224 pixels in fp32 (147 MiB) need 1.2 GiB."""

ENOUGH_FILES = 4096
"""A worker passes each tensor by one open file: 8 workers x 2 batches x 100 tensors = 1,600."""

SLOW_DISK_BYTES_PER_S = 100 * MIB
"""A spinning disk reads one file in a row about that fast, and small files far slower."""

LITTLE_DISK_BYTES = 5 * GIB
"""One checkpoint of a 400-million-parameter model with Adam's state is 4.5 GiB."""

DISTURBING_SHARE = 0.05
"""The limit above which a trial is thrown away, see docs/design.md."""


def cores(machine: Machine) -> Check:
    """Compare what libraries think they have with what the process may use."""
    seen, usable = machine.logical_cores, machine.usable_cores
    affinity, quota = machine.facts.get("affinity_cores", seen), machine.facts.get("quota_cores")
    if usable >= seen:
        return Check(status=OK, what=f"{usable} cores, all of them usable")
    cause = f"the affinity mask leaves {affinity}"
    if quota is not None and quota < affinity:
        cause = f"the cgroup's CPU quota is {quota:g}"
    return Check(
        status=WARN,
        what=f"{usable} of {seen} cores usable: {cause}",
        why=f"os.cpu_count() says {seen}; whoever starts that many threads or workers is throttled",
        next=f"num_workers up to {usable}; export OMP_NUM_THREADS={usable}",
    )


def threads(machine: Machine) -> Check | None:
    """Report a thread count in the environment that does not suit the cores."""
    text = machine.facts.get("variables", {}).get("OMP_NUM_THREADS", "")
    if not text.isdigit():
        return None
    count = int(text)
    if count <= machine.usable_cores and (count > 1 or machine.device.kind != "cpu"):
        return Check(status=OK, what=f"OMP_NUM_THREADS={count}")
    if count == 1 == machine.usable_cores:
        return Check(status=OK, what="OMP_NUM_THREADS=1 on one core")
    why = "threads wait for each other on too few cores" if count > 1 else "one core does the work"
    return Check(
        status=WARN,
        what=f"OMP_NUM_THREADS={count} on {machine.usable_cores} usable cores",
        why=why,
        next=f"export OMP_NUM_THREADS={machine.usable_cores}",
    )


def memory(machine: Machine) -> Check:
    """Report the memory limit and swap in use."""
    facts = machine.facts
    limited = facts.get("memory_limit_bytes") is not None
    what = f"{format_bytes(machine.memory_bytes)} of memory{' (cgroup limit)' if limited else ''}"
    used = facts.get("swap_used_bytes", 0)
    if used < machine.memory_bytes / 100:
        return Check(status=OK, what=f"{what}, no swap in use")
    return Check(
        status=WARN,
        what=f"{what}, {format_bytes(used)} swapped out",
        why="a page that has to come back from disk stalls the step that touches it",
        next="close what holds the memory; fewer workers and a smaller prefetch_factor need less",
    )


def shared_memory(machine: Machine) -> Check | None:
    """Report a /dev/shm that loader workers would overrun."""
    if not machine.facts.get("system", "").startswith("Linux"):
        return None
    size, free = machine.facts.get("shm_bytes", 0), machine.shm_free_bytes
    if free >= ROOMY_SHM_BYTES:
        return Check(status=OK, what=f"/dev/shm: {format_bytes(free)} free")
    return Check(
        status=BAD if not size else WARN,
        what=f"/dev/shm: {format_bytes(free)} free of {format_bytes(size)}"
        if size
        else "no /dev/shm",
        why="loader workers hand batches over through it; when it is full they die of 'Bus error'",
        next="docker run --shm-size=8g (or --ipc=host); until then few workers, small prefetch",
    )


def open_files(machine: Machine) -> Check | None:
    """Report a limit on open files that loader workers would reach."""
    soft, hard = machine.facts.get("open_files_soft"), machine.facts.get("open_files_hard")
    if soft is None or hard is None:
        return None
    if soft < 0 or soft >= ENOUGH_FILES:
        return Check(status=OK, what=f"open files: limit {'none' if soft < 0 else soft}")
    reachable = ENOUGH_FILES if hard < 0 else min(hard, ENOUGH_FILES)
    return Check(
        status=WARN,
        what=f"open files: limit {soft}",
        why="each tensor of a waiting batch is one open file: 'received 0 items of ancdata'",
        next=f"ulimit -n {reachable}" if reachable > soft else "ask for a higher hard limit",
    )


def huge_pages(machine: Machine) -> Check | None:
    """Report huge pages that are switched off."""
    mode = machine.facts.get("huge_pages", "")
    if not mode:
        return None
    if mode != "never":
        return Check(status=OK, what=f"transparent huge pages: {mode}")
    return Check(
        status=WARN,
        what="transparent huge pages: never",
        why="big activations come in 4 KiB pages, one page fault each",
        next="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled   (as root)",
    )


def disk(folder: Path) -> Check:
    """Measure a short write and read, and report slow or full disks."""
    try:
        speed = disk_speed(folder)
    except OSError as error:
        return Check(
            status=BAD,
            what=f"{folder} cannot be written: {error.strerror or error}",
            why="checkpoints and flatout's own results could not be saved there",
            next="free some space, or set TMPDIR to a folder that can be written",
        )
    what = (
        f"{folder}: reads {format_bytes(speed.read_bytes_per_s)}/s, "
        f"writes {format_bytes(speed.write_bytes_per_s)}/s, {format_bytes(speed.free_bytes)} free "
        f"({format_bytes(speed.probe_bytes)} probe)"
    )
    if speed.free_bytes < LITTLE_DISK_BYTES:
        return Check(
            status=WARN,
            what=what,
            why="a few checkpoints fill the disk, and a save that fails half-way is lost",
            next="free some space before a long training",
        )
    if speed.read_bytes_per_s < SLOW_DISK_BYTES_PER_S:
        return Check(
            status=WARN,
            what=what,
            why="data sets read from here will starve the device",
            next="copy the data to a local disk, or into one packed file",
        )
    return Check(status=OK, what=what)


def quiet(load: Load) -> Check:
    """Report that others are using the cores right now."""
    if load.foreign_share <= DISTURBING_SHARE and load.steal_share <= DISTURBING_SHARE:
        return Check(status=OK, what="the cores are free for measuring")
    return Check(
        status=WARN,
        what=f"others use {format_share(load.foreign_share)} of the cores now"
        f" ({format_share(load.steal_share)} is taken by other virtual machines)",
        why="trials beside foreign load are thrown away and repeated, so tuning takes longer",
        next="stop the other work while tuning",
    )
