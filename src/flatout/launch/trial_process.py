"""Run a workload once in a child process, under a supervisor, and return how that ended."""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flatout.agent.bootstrap import SPEC_VARIABLE
from flatout.agent.events import ELSEWHERE, EMPTY
from flatout.agent.journal_file import JOURNAL_NAME, is_at_or_below
from flatout.agent.processes import kill_descendants, kill_started_with
from flatout.hardware.limits import MemoryShortage, memory_shortage
from flatout.launch import trial_folders as jobs
from flatout.launch.overlay import can_overlay
from flatout.launch.rollback import FAILED_NAME, Undone, rollback
from flatout.launch.supervisor import RESERVE
from flatout.launch.trial_folders import (
    changed_files,
    hold_working_folder,
    is_supervised,
    list_files,
    make_trial_folder,
    user_name,
)
from flatout.records.errors import UserError
from flatout.records.files import SOURCE, module_command, private_folder, with_boot
from flatout.records.input_files import MAX_OWN_BYTES, read_json
from flatout.records.json_records import from_plain, to_plain
from flatout.records.secrets import hide_in_text
from flatout.records.trial import Workload
from flatout.records.trial_result import TrialResult
from flatout.records.trial_spec import TrialSpec

SUPERVISE = (
    "import sys; sys.path.append(sys.argv.pop(1)); from flatout.launch import supervisor; "
    "sys.exit(supervisor.main(sys.argv))"
)
"""What the supervisor runs: nothing that is installed, or in the user's folder, comes before the
standard library that it needs."""
TRY_OVERLAY = (
    "import sys, pathlib; sys.path.append(sys.argv[1]); from flatout.launch import overlay; "
    "overlay.enter_overlay(*map(pathlib.Path, sys.argv[2:]))"
)
RANK_LAUNCHER = "flatout.launch.rank_launcher"
POLL_S = 0.02
PATIENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that wait until the user's files are as before."""
MAX_LOG_CHARACTERS = 20_000
"""The end of a script's output that is looked at."""
TRACE = "memory-"
"""What the folders of traces of memory begin with; `spec.json` there says whose it is."""
SILENCED = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "debug",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "SWANLAB_MODE": "disabled",
}
"""Trackers are off in trials: a trial is not a run of the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """What two children of one folder share that run at the same time."""

    lock: int | None
    """The descriptor by which the folder is held for both of them."""
    passed: int
    """A descriptor that the child has too."""
    is_cancelled: Callable[[], bool]
    """Whether the child is to be ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """How one child process is run."""

    entry: str
    """Dotted module whose `install(spec)` runs in the child once torch is imported."""
    spec: TrialSpec = field(default_factory=TrialSpec)
    """Passed on to `install`, with what this module fills in."""
    keep: tuple[str, ...] = ()
    """Names, with wildcards, of files that the child leaves for its caller."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The whole environment of the child, before the keys that this module adds."""
    limit_s: float = 300.0
    """Wall time after which the child is ended."""
    hang_s: float = 120.0
    """Time without any sign of training after which the child counts as hung."""
    seed: int | None = 0
    """Seeds Python, numpy and torch before the script's own code; None leaves them alone."""
    shared: SharedRun | None = None
    """Of one of two that run at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one child process ended, as raw facts."""

    why: str
    """`ended`, `limit`, `hang`, `result` (a child of the script trained), `unrecorded` (a change
    could not be noted, so it was not done) or `parent gone`."""
    exit_code: int | None
    results: tuple[TrialResult, ...]
    """What the training processes wrote, the one with the most steps first."""
    log: str
    """Last output of the script."""
    wall_s: float
    error: str = ""
    """Of an ending with `unrecorded`: why a change could not be noted for undoing."""
    undone: int = 0
    kept: tuple[str, ...] = ()
    """What differs from before the trial because another program was at work, one line each."""
    orphans: int = 0
    is_overlaid: bool = False
    changed_files: tuple[str, ...] = ()
    waits_for_batch: bool = False
    """Of a hang: whether the loop was waiting for its loader."""
    stuck: tuple[str, ...] = ()
    """Of a hang: the processes below the script's and what they waited in."""
    trains_elsewhere: bool = False
    """Whether a thread other than a process's main one trained, which no one listens to."""
    empty_loader: Mapping[str, Any] | None = None
    """What a loader was asked that ended without having given a batch; None without one."""
    exhaustion: Mapping[str, Any] | None = None
    """What held the memory when there was no more; None where that was not seen."""
    shortage: MemoryShortage = MemoryShortage(0, 0.0)
    """What the kernel counted while it ran, for all processes of flatout's control group."""


def run_process(workload: Workload, options: ProcessOptions, keep: Path | None = None) -> Ending:
    """Run the workload in a supervised child and return its ending.

    Everything below the child is gone when this returns, and on an exception too. Files that the
    child left under the names in `options.keep` are moved to the folder `keep`.
    """
    shared = options.shared
    holding = nullcontext(shared.lock) if shared else hold_folder_of(workload)
    passed = (shared.passed,) if shared else ()
    with holding as lock, _interrupts_noted() as raise_interrupt:
        folder = make_trial_folder(scratch_root())
        jobs.announce(folder, options.spec.mode, workload.command_line)
        before = list_files(workload.folder)
        shortage = memory_shortage()
        life_line, our_end = os.pipe()
        supervisor: subprocess.Popen[bytes] | None = None
        try:
            spec = _supervisor_spec(workload, options, folder, life_line)
            spec |= {"lock": lock, "passed": passed}
            spec_path = folder / "supervisor.json"
            # Without a name: it holds the user's secrets, and a killed flatout leaves files.
            with tempfile.TemporaryFile("w+", encoding="utf-8", dir=folder) as environment:
                json.dump(spec.pop("environment"), environment)
                environment.seek(0)
                spec_path.write_text(json.dumps(spec), encoding="utf-8")
                supervisor = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", SUPERVISE, str(SOURCE), str(spec_path)],
                    env={"PATH": os.environ.get("PATH", os.defpath)},
                    stdin=environment,
                    pass_fds=(life_line, *passed, *(() if lock is None else (lock,))),
                    start_new_session=True,
                )
            while supervisor.poll() is None and not (shared and shared.is_cancelled()):
                raise_interrupt()
                time.sleep(POLL_S)
            ending = _read_ending(folder)
            _keep(folder, options.keep, keep)
        finally:
            os.close(our_end)
            os.close(life_line)
            if supervisor is not None:
                _end(supervisor)
                if not (folder / "ending.json").exists():
                    for line in _undo(folder).differences:  # the supervisor was killed
                        sys.stderr.write(f"flatout: {line}\n")
            _discard(folder)
        changed = changed_files(before, workload.folder)
        for line in ending["kept"]:
            sys.stderr.write(f"flatout: {line}\n")
        now = memory_shortage()
        during = MemoryShortage(
            max(0, now.num_kills - shortage.num_kills), max(0.0, now.stalled_s - shortage.stalled_s)
        )
        return Ending(**ending, changed_files=changed, shortage=during)


def hold_folder_of(workload: Workload) -> AbstractContextManager[int | None]:
    """Hold the folder that a workload runs in, for trials of it."""
    is_free = SPEC_VARIABLE in os.environ
    return hold_working_folder(workload.folder, scratch_root(), is_free=is_free)


def scratch_root() -> Path:
    """Return the folder for trials, created; on a disk, private, not inside the user's folders."""
    spare = Path(tempfile.gettempdir()) / f"flatout-{os.getuid()}"
    for candidate in (*_cache_folders(), spare):
        with contextlib.suppress(OSError):
            return private_folder(candidate)
    raise UserError("no folder for trials: make ~/.cache writable, or set XDG_CACHE_HOME")


def is_overlaid(folder: Path) -> bool:
    """Return whether a trial's writes in a folder are kept out of it here; a process tries."""
    if not can_overlay(folder, scratch_root()):
        return False
    with tempfile.TemporaryDirectory(prefix="try-", dir=scratch_root()) as room:
        command = [sys.executable, "-I", "-S", "-c", TRY_OVERLAY, str(SOURCE), str(folder), room]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def compile_cache(workload: Workload) -> Path:
    """Return the folder of what a script's trials and runs compile, made if need be."""
    # Scripts are called train.py everywhere: the folder tells them apart.
    place = hashlib.sha256(os.fsencode(workload.folder / workload.target)).hexdigest()[:8]
    cache = scratch_root() / "compiled" / f"{workload.name}-{place}"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _cache_folders() -> list[Path]:
    """Return the user's cache folder, if any: a relative one would be in the user's project."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return [named / "flatout"]
    home = _home()
    return [] if home is None else [home / ".cache" / "flatout"]


def _home() -> Path | None:
    """Return the user's home; None where there is neither HOME nor an entry for this user."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def byte_code(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a trial leaves no byte code among the user's files.

    Where torch was installed without byte code, importing it compiles thousands of files: the
    first trial keeps what it compiled in the scratch folder, the later ones start seconds sooner.
    """
    torch = importlib.util.find_spec("torch")
    kept = importlib.util.cache_from_source(torch.origin) if torch and torch.origin else ""
    if Path(kept).exists() or environment.get("PYTHONPYCACHEPREFIX"):
        return {"PYTHONDONTWRITEBYTECODE": "1"}
    # The user's variable would forbid to write there too; empty, it forbids nothing.
    folder = str(scratch_root() / "bytecode")
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}


def clean_up_stale_trials() -> int:
    """Roll back trials and traces that were killed; return how many there were."""
    mended = 0
    root = scratch_root()
    jobs.forget_ended(root)
    for path in (*root.glob("trial-*/supervisor.json"), *root.glob(f"{TRACE}*/spec.json")):
        folder, facts = path.parent, jobs.find_owner(path)  # another version's may name none
        if facts is None or not jobs.has_ended(facts) or is_supervised(folder):
            continue
        with contextlib.suppress(OSError):
            undone = _undo(folder, ended=False)
            mended += bool(undone.num_entries)
            for line in undone.differences:
                sys.stderr.write(f"flatout: {line}\n")
            _discard(folder)
    return mended


def command_of(workload: Workload) -> list[str]:
    """Return the argv that runs the workload, exactly as a user would, or in several ranks."""
    python = [workload.python, *workload.python_options]
    if workload.is_task:
        module = "parallel.task_ranks" if workload.is_spread else "agent.task_runner"
        command = [*python, "-m", f"flatout.{module}", workload.target]
    elif workload.target.startswith("-m "):
        command = [*python, "-m", workload.target[3:], *workload.arguments]
    else:
        command = [*python, workload.target, *workload.arguments]
    if workload.ranks == 1:
        return command
    options = [str(workload.ranks), str(workload.restarts), str(int(not workload.is_spread))]
    return module_command(workload.python, RANK_LAUNCHER, *options, *command)


def armed_environment(environment: Mapping[str, str], child_spec: Path) -> dict[str, str]:
    """Return the environment in which a Python of the script's is armed."""
    return {**with_boot(environment), SPEC_VARIABLE: str(child_spec)}


def _supervisor_spec(
    workload: Workload, options: ProcessOptions, folder: Path, life_line: int
) -> dict[str, Any]:
    child_spec = folder / "child.json"
    environment = {**options.environment, **SILENCED, **byte_code(options.environment)}
    environment["MLFLOW_TRACKING_URI"] = (folder / "mlflow").as_uri()
    if options.seed is not None:
        environment.setdefault("PYTHONHASHSEED", str(options.seed))
    cwd = workload.folder.resolve()
    return {
        **jobs.owner(),
        "argv": command_of(workload),
        "cwd": str(cwd),
        "folder": str(folder),
        "child_spec": str(child_spec),
        "environment": armed_environment(environment, child_spec),
        "limit_s": options.limit_s,
        "hang_s": options.hang_s,
        "life_line": life_line,
        "terminal": _terminal_size(),
        "input": input_file(),
        "overlay": can_overlay(cwd, folder),
        "child": to_plain(
            replace(
                options.spec,
                entry=options.entry,
                folder=str(folder),
                prefix=sys.prefix,
                seed=options.seed,
                descendants_end=True,
                undo=str(folder),
                not_journaled=tuple(not_journaled(environment, cwd)),
            )
        ),
    }


def _terminal_size() -> tuple[int, int] | None:
    """Return lines and columns of the terminal the user types at, None where there is none."""
    try:
        size = os.get_terminal_size(sys.stdin.fileno())
    except (OSError, ValueError, AttributeError):
        return None  # redirected, closed, or replaced by a test
    return size.lines, size.columns


def input_file() -> str | None:
    """Return a path to the file that standard input comes from, None where that is no file.

    Each trial reads it from its beginning. A pipe could be read once only, or never end.
    """
    try:
        descriptor = sys.stdin.fileno()
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    except (OSError, ValueError, AttributeError):
        return None
    return f"/proc/{os.getpid()}/fd/{descriptor}" if is_file else None


def not_journaled(environment: Mapping[str, str], folder: Path) -> list[str]:
    """Return the folders whose content is no one's: devices, caches, temporary files.

    Memory in /dev/shm is among them: each process would copy what others made there for a batch. A
    cache that holds the script's folder is not: what is there is the user's.
    """
    home = _home() or scratch_root()
    named = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "TORCH_HOME", "TMPDIR")
    caches = [
        str(environment.get("XDG_CACHE_HOME") or home / ".cache"),
        str(Path(tempfile.gettempdir()) / f"torchinductor_{user_name()}"),
        # Triton's own: rolled back, every kernel would be compiled and tuned again in each trial.
        str(Path(environment.get("TRITON_HOME") or home) / ".triton"),
        *(environment[name] for name in named if environment.get(name)),
    ]
    here = os.path.realpath(folder)
    others = [cache for cache in caches if not is_at_or_below(here, os.path.realpath(cache))]
    return ["/dev", "/proc", "/sys", str(scratch_root()), *others]


def _read_ending(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"why": "limit", "exit_code": None, "wall_s": 0.0}
    found |= _find_plain(folder / "ending.json") or {}
    return found | {
        "kept": tuple(found.get("kept", ())),
        "stuck": tuple(found.get("stuck", ())),
        "results": tuple(sorted(_results(folder), key=lambda one: -len(one.segments))),
        "trains_elsewhere": find_noted(folder, ELSEWHERE) is not None,
        "empty_loader": find_noted(folder, EMPTY),
        "exhaustion": find_noted(folder, "oom"),
        "log": last_output(folder / "log"),
    }


def last_output(log: Path) -> str:
    """Return the end of a script's output, with secrets hidden; empty without any."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_CHARACTERS))
            text = file.read(MAX_LOG_CHARACTERS).decode("utf-8", errors="replace")
    except OSError:
        return ""
    return hide_in_text(text)


def _results(folder: Path) -> list[TrialResult]:
    """Return what the training processes wrote; of a killed one what it had written by then."""
    done = {p.stem.partition("-")[2]: p for p in folder.glob("result-*.json")}
    known = {p.stem.partition("-")[2]: p for p in folder.glob("partial-*.json")} | done
    read = map(find_result, known.values())
    return [result for result in read if result is not None]


def find_result(path: Path) -> TrialResult | None:
    """Return a result; None of a process that was killed or had no room to write it whole."""
    found = _find_plain(path)
    try:
        return None if found is None else from_plain(TrialResult, found)
    except ValueError as error:
        raise UserError(f"{path.name} is not what a training process writes: {error}") from None


def _find_plain(path: Path) -> dict[str, Any] | None:
    """Return what a training process wrote; None of one that was killed or had no room."""
    try:
        plain = read_json(path, MAX_OWN_BYTES)
    except (OSError, ValueError):
        return None
    return plain if isinstance(plain, dict) else None


def find_noted(folder: Path, name: str) -> dict[str, Any] | None:
    """Return what a training process noted under a name; of several the first that did."""
    noted = sorted(folder.glob(f"{name}-*.json"), key=lambda path: path.stat().st_mtime)
    return _find_plain(noted[0]) if noted else None


def _keep(folder: Path, names: Sequence[str], keep: Path | None) -> None:
    if keep is None:
        return
    for name in names:
        for found in folder.glob(name):
            shutil.move(found, keep / found.name)


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[Callable[[], None]]:
    """Note Ctrl-C and its like instead of raising them; yield what raises one of them.

    However many come, and between whichever two lines, the user's files are put back. Of several
    one that is no Ctrl-C is raised: whoever ended flatout reads its exit code. What was
    not raised by then is raised at the end. SIGQUIT ends flatout at once, and leaves the rest to
    the supervisor. A thread other than the main one hears no signals.
    """
    heard: list[int] = []
    handlers: dict[int, Callable[[int, Any], Any]] = {}

    def raise_one() -> None:
        if heard:
            # Of two at once Python takes the lower number first: that is no order of their coming.
            number = next((each for each in heard if each != signal.SIGINT), signal.SIGINT)
            heard.clear()
            handlers[number](number, None)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in PATIENT:
                handler = signal.getsignal(number)
                if callable(handler):  # ignored, or left to the system, it stays so
                    handlers[number] = handler
                    signal.signal(number, lambda number, _frame: heard.append(number))
        yield raise_one
    finally:
        # Blocked, so that none comes between two handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, PATIENT)
        for replaced, handler in handlers.items():
            signal.signal(replaced, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PATIENT)
    raise_one()


def _end(supervisor: "subprocess.Popen[bytes]") -> None:
    """Let the supervisor clean up; kill what is left if it does not."""
    if supervisor.poll() is not None:
        return
    supervisor.send_signal(signal.SIGTERM)
    try:
        supervisor.wait(timeout=15)
    except subprocess.TimeoutExpired:
        kill_descendants(supervisor.pid)
        supervisor.kill()
        supervisor.wait()


def _undo(folder: Path, *, ended: bool = True) -> Undone:
    """Do what a killed supervisor left undone: end the trial's processes, and roll back.

    The kernel has ended what main threads started; what others did is known by its environment.
    """
    kill_started_with(SPEC_VARIABLE, str(folder / "child.json"))
    (folder / RESERVE).unlink(missing_ok=True)
    return rollback(folder, ended=ended)


def _discard(folder: Path) -> None:
    """Remove the trial's folder; overlay leaves a work folder without permissions.

    It stays while something could not be put back: the next flatout tries again.
    """
    if (folder / FAILED_NAME).exists() or (folder / JOURNAL_NAME).exists():
        return
    work = folder / "work"
    for path in (work / "work", work):
        with contextlib.suppress(OSError):
            path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
