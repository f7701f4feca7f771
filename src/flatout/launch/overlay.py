"""Overlay the working folder for one child: whatever it writes there lands in a throw-away folder.

Runs between fork and exec of the child, in a user and mount namespace of its own; the caller's
user id is kept. C++ and Rust writers are covered too, which the journal cannot see. Needs a kernel
that allows unprivileged overlay mounts; containers often forbid it, then the journal is used.
"""

import ctypes
import os
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MOUNTS = Path("/proc/self/mountinfo")


def can_overlay(folder: Path, scratch: Path) -> bool:
    """Return whether `folder` may be overlaid with its upper layer in `scratch`.

    Not when another file system is mounted below it (it would look empty), when the scratch
    folder is inside it, or when its name holds characters that mount options split at.
    """
    folder, scratch = folder.resolve(), scratch.resolve()
    if set(str(folder) + str(scratch)) & set(",:\\"):
        return False
    if scratch.is_relative_to(folder) or folder == Path(folder.anchor):
        return False
    return not any(p != folder and p.is_relative_to(folder) for p in _mount_points())


def enter_overlay(folder: Path, scratch: Path) -> None:
    """Overlay `folder` for this process and what it will exec. Call in the forked child only.

    Raises:
        OSError: where the kernel or the container forbids a step.
    """
    user, group = os.getuid(), os.getgid()
    upper, work = scratch / "upper", scratch / "work"
    upper.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
    options = f"userxattr,lowerdir={folder},upperdir={upper},workdir={work}"
    target = str(folder).encode()
    _check(libc.mount(b"overlay", target, b"overlay", 0, options.encode()), "mount overlay")
    os.chdir(folder)


def written_files(scratch: Path) -> int:
    """Return how many files the child left in the throw-away folder."""
    upper = scratch / "upper"
    return sum(1 for path in upper.rglob("*") if not path.is_dir()) if upper.exists() else 0


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount_points() -> list[Path]:
    # As bytes: a disk from another system may have a name that is not UTF-8.
    lines = MOUNTS.read_bytes().splitlines()
    return [Path(os.fsdecode(line.split()[4]).replace("\\040", " ")) for line in lines]
