"""The command `container`: the stack of this machine, to be written as a Dockerfile."""

import re
from dataclasses import replace
from pathlib import Path

import flatout
from flatout.records import catalogue
from flatout.records.errors import UserError
from flatout.records.machine import ARCHIVES, Machine, Stack
from flatout.records.recipe import Recipe
from flatout.records.units import GIB

WHEELS = "https://download.pytorch.org/whl/{build}"
LEAST_SHM_GIB = 2
"""Docker's own 64 MiB end loader workers with a bus error; `flatout doctor` asks for this much."""
PLAIN = re.compile(r"[\w./+:@%=~#&?-]+")
"""Paths and addresses that need no quoting, neither for the shell nor in a Dockerfile."""


def stack_of(
    machine: Machine,
    *,
    recipe: Path | None = None,
    requirements: Path | None = None,
    script: str = "train.py",
) -> Stack:
    """Return what a container needs to train a script as this machine does, with torch's build.

    The recipe and the requirements have to be in the folder that is built from.
    """
    if not machine.torch_version:
        raise UserError("torch is not installed here: there is no stack to write down")
    kind, build = _build(machine)
    return Stack(
        kind=kind,
        torch=machine.torch_version.partition("+")[0],
        index=WHEELS.format(build=build),
        python=_short(str(machine.facts.get("python", "3.12"))),
        flatout=flatout.__version__,
        shm_gib=max(LEAST_SHM_GIB, int(machine.facts.get("shm_bytes", 0)) // GIB),
        recipe=_beside(recipe),
        requirements=_beside(requirements),
        script=script,
        about=machine.device.name,
    )


def with_flatout(stack: Stack, source: str | None, recipe: Recipe) -> Stack:
    """Return the stack with what flatout is installed from, and the extras of the recipe.

    The source is a wheel or a clone in the folder that is built from, or an address that pip knows;
    never a mere name: flatout is in no index, and whoever takes the name there would be installed.
    """
    if source is None:
        raise UserError(
            "a container with a recipe needs flatout, which is in no package index: "
            "make a wheel here with 'pip wheel --no-deps --wheel-dir . CLONE' "
            "and name it with --flatout"
        )
    if not PLAIN.fullmatch(source):
        raise UserError(f"--flatout {source!r}: name a path or an address without blanks or quotes")
    if "://" not in source:
        is_archive = source.endswith(ARCHIVES) and Path(source).is_file()
        if not is_archive and not Path(source, "pyproject.toml").is_file():
            raise UserError(f"--flatout {source}: there is no such wheel, and no clone of flatout")
        source = _inside(Path(source))
    extras = {catalogue.technique_class(choice.technique).extra for choice in recipe.choices}
    return replace(stack, source=source, extras=tuple(sorted(extras - {""})))


def _build(machine: Machine) -> tuple[str, str]:
    """Return the kind of container, and torch's name of the build that was measured."""
    hip, cuda = machine.facts.get("torch_hip"), machine.facts.get("torch_cuda")
    if hip:
        return "rocm", f"rocm{_short(str(hip))}"
    return ("cuda", f"cu{_short(str(cuda)).replace('.', '')}") if cuda else ("cpu", "cpu")


def _short(version: str) -> str:
    """Return the first two numbers of a version.

    >>> _short("3.12.4"), _short("6.4.43482-0f2d60242")
    ('3.12', '6.4')
    """
    return ".".join(version.split(".")[:2])


def _beside(path: Path | None) -> str:
    """Return the name of a file in the folder that is built from."""
    if path is None:
        return ""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    return _inside(path)


def _inside(path: Path) -> str:
    """Return the name of a file or a folder below the folder that is built from."""
    if path.is_absolute() or ".." in path.parts:
        raise UserError(
            f"docker copies only from the folder it builds in: copy {path} here and name that"
        )
    if not PLAIN.fullmatch(str(path)) or str(path).startswith("-"):
        raise UserError(
            f"{str(path)!r} cannot stand in a Dockerfile; rename it to letters, digits and . _ - /"
        )
    return path.as_posix()
