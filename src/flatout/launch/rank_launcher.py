"""Start the ranks of a training that was written for one device, and say which of them failed.

torchrun starts and supervises them. Only rank 0 has the terminal, and only what it writes stays:
the others write into an overlay of the working folder, where each finds again what it has written.

Run as a module, with RANKS RESTARTS APART COMMAND..., where APART is 0 for a command that writes on
all ranks what belongs together. torchrun starts it again in each rank, where it becomes the
command.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flatout.hardware.limits import usable_cores
from flatout.launch.overlay import can_overlay, enter_overlay
from flatout.launch.trial_folders import announce
from flatout.launch.trial_process import RANK_LAUNCHER, scratch_root
from flatout.records.files import module_command

START = "start"
LAST_LINES = 15
"""Lines of a failed rank's output that are shown."""
CANNOT_START = 2
THREADS = "OMP_NUM_THREADS"
DEVICES = "CUDA_VISIBLE_DEVICES"
RENDEZVOUS = "FLATOUT_RENDEZVOUS"
"""Environment variable of a training on several hosts: their number, and `host:port` of one."""
IS_FIRST = "FLATOUT_IS_FIRST_HOST"
"""Environment variable: 1 on the host that `host:port` is of, 0 on the others. torchrun finds it by
the host's name where no one says it, and some hosts do not know their address by their name."""


def launch(ranks: int, restarts: int, apart: str, command: Sequence[str]) -> int:
    """Run a command in so many ranks and return the exit code of the first that failed, or 0.

    All are started again when one failed, `restarts` times at most. Where `apart` is "1", only what
    rank 0 writes is to stay.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=scratch_root()))
    announce(folder, "ranks", "")  # should this be killed, the next command removes it
    # torchrun would give each rank one thread, and its reports repeat what is said below.
    hosts = int(os.environ.get(RENDEZVOUS, "1").partition(" ")[0])
    os.environ.setdefault(THREADS, str(max(1, usable_cores() * hosts // ranks)))
    level = os.environ.get("LOGLEVEL")
    os.environ["LOGLEVEL"] = "CRITICAL"
    # DDP's reducer advises against looking for unused parameters, which any script may have.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    words = [START, str(folder), apart, level or "", *command]
    start = module_command(sys.executable, RANK_LAUNCHER, *words)
    try:
        limits = [*_hosts(ranks), "--max-restarts", str(restarts)]
        arguments = [*limits, "--no-python", *start]
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        sys.stderr.write(
            f"flatout: rank {rank} of {ranks} ended with exit code {code}, "
            "and the others were stopped\n"
        )
        log = folder / f"rank-{rank}.log"
        if log.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            sys.stderr.write("".join(f"  {line}\n" for line in lines))
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _hosts(ranks: int) -> list[str]:
    """Return torchrun's options for the ranks: all on this host, or a part of them."""
    count, _, endpoint = os.environ.pop(RENDEZVOUS, "1 ").partition(" ")
    here = ["--nproc-per-node", str(ranks // int(count))]
    if not endpoint:
        return ["--standalone", *here]
    is_first = os.environ.pop(IS_FIRST, "")
    known = ["--rdzv-conf", f"is_host={is_first}"] if is_first else []
    return ["--nnodes", count, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *known, *here]


def start(folder: Path, apart: str, level: str, command: list[str]) -> None:
    """Become the command, as the rank that torchrun's variables name."""
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    os.environ.pop("LOGLEVEL")
    if level:
        os.environ["LOGLEVEL"] = level
    visible = os.environ.get(DEVICES)
    if visible or (visible is None and Path("/dev/nvidia0").exists()):
        # A script's own "cuda" and "cuda:0" are then this rank's device.
        names = visible.split(",") if visible else []
        os.environ[DEVICES] = names[local] if local < len(names) else str(local)
    if rank:
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if apart == "1":
            _keep_files_apart(folder / f"rank-{rank}")
    os.execv(command[0], command)  # noqa: S606  no shell: the command is started as it is


def _keep_files_apart(scratch: Path) -> None:
    here = Path.cwd()
    try:
        if not can_overlay(here, scratch):
            raise OSError(0, "a mount below the folder, or its name, is in the way")
        enter_overlay(here, scratch)
    except OSError as error:
        sys.stderr.write(
            f"flatout: {here} cannot be overlaid here ({error.strerror}), so all ranks would write "
            "the same files; start it in a container that allows user namespaces\n"
        )
        sys.exit(CANNOT_START)


if __name__ == "__main__":
    if sys.argv[1] == START:
        start(Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        sys.exit(launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
