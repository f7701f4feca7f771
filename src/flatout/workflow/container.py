"""The verb `container`: the stack of this machine, to be written as a Dockerfile."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import flatout
from flatout import techniques
from flatout.core.container import ARCHIVES, Stack
from flatout.core.errors import UserError
from flatout.core.machine import Machine
from flatout.core.recipe import Recipe
from flatout.core.units import GIB

CUDA_IMAGES = {
    "12.4": "12.4.1-base-ubuntu22.04",
    "12.6": "12.6.3-base-ubuntu24.04",
    "12.8": "12.8.1-base-ubuntu24.04",
    "12.9": "12.9.1-base-ubuntu24.04",
    "13.0": "13.0.1-base-ubuntu24.04",
}
"""Tags of nvidia/cuda by CUDA version. torch brings CUDA's libraries along: the base is enough."""
CUDA_WHEELS = {
    "12.4": ((2, 4), (2, 6)),
    "12.6": ((2, 6), None),
    "12.8": ((2, 7), None),
    "12.9": ((2, 8), None),
    "13.0": ((2, 9), None),
}
"""The first torch with wheels for a CUDA version and, where it is known, the last (the notes of
torch's releases; https://pytorch.org/get-started/previous-versions)."""
ROCM_IMAGE = "rocm/dev-ubuntu-24.04:{version}"
"""AMD's images with the runtime and the tools, by ROCm version."""
ROCM_VERSION = "6.4"
"""Where this machine's torch is no ROCm build: the newest that torch 2.9 has wheels for."""
WHEELS = "https://download.pytorch.org/whl/{build}"
UBUNTU_PYTHON = {"22.04": "3.10", "24.04": "3.12"}
ALLOCATORS = {"22.04": "libtcmalloc-minimal4", "24.04": "libtcmalloc-minimal4t64"}
"""tcmalloc's package by release of Ubuntu; Debian 12 has the name of the older one."""
LEAST_SHM_GIB = 2
"""Docker's own 64 MiB end loader workers with a bus error; `flatout doctor` asks for this much."""
LINT_S = 60.0
PLAIN = re.compile(r"[\w./+:@%=~#&?-]+")
"""Paths and addresses that need no quoting, neither for the shell nor in a Dockerfile."""
VERSION = re.compile(r"\d+\.\d+")
RELEASE = re.compile(r"\d+")


def stack_of(
    machine: Machine,
    *,
    recipe: Path | None = None,
    requirements: Path | None = None,
    script: str = "train.py",
    cuda: str | None = None,
    is_rocm: bool = False,
) -> Stack:
    """Return what a container needs to train as this machine does.

    Args:
        machine: What was measured; its torch decides the kind unless the next ones do.
        recipe: A recipe to run with; it has to lie beside the Dockerfile.
        requirements: The script's own packages, beside the Dockerfile too.
        script: What is trained, for the command in the first lines.
        cuda: CUDA version of the container, as `12.8`, in place of that of this torch.
        is_rocm: For an AMD GPU, whatever this torch is built for.

    Raises:
        UserError: if no torch is installed, there is no image or no wheel for this CUDA, or a file
            is missing or lies elsewhere.
    """
    if not machine.torch_version:
        raise UserError("torch is not installed here: there is no stack to write down")
    if cuda is not None and is_rocm:
        raise UserError("a container is for CUDA or for ROCm; give one of --cuda and --rocm")
    kind, version = _kind(machine, cuda, is_rocm=is_rocm)
    if kind == "cuda":
        _check_cuda(version, machine.torch_version)
    python = _short(str(machine.facts.get("python", "3.12")))
    image = _image(kind, version, python)
    release = "22.04" if "ubuntu22.04" in image or kind == "cpu" else "24.04"
    return Stack(
        kind=kind,
        image=image,
        torch=machine.torch_version.partition("+")[0],
        index=WHEELS.format(build=_build(kind, version)),
        python=python,
        image_python=python if kind == "cpu" else UBUNTU_PYTHON[release],
        allocator_package=ALLOCATORS[release],
        flatout=flatout.__version__,
        shm_gib=max(LEAST_SHM_GIB, int(machine.facts.get("shm_bytes", 0)) // GIB),
        recipe=_beside(recipe),
        requirements=_beside(requirements),
        script=script,
        about=machine.device.name,
    )


def with_flatout(stack: Stack, source: str | None, recipe: Recipe) -> Stack:
    """Return the stack with what flatout is installed from, and the extras of the recipe.

    Args:
        stack: Of this machine.
        source: A wheel or a clone in the folder that is built from, or an address that pip knows.
            Never a mere name: flatout is in no index, and whoever takes the name there would be
            installed.
        recipe: What the container trains with.

    Raises:
        UserError: if nothing is named, or what is named cannot be installed.
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
    extras = {techniques.technique_class(choice.technique).extra for choice in recipe.choices}
    return replace(stack, source=source, extras=tuple(sorted(extras - {""})))


def lint(text: str) -> str | None:
    """Return what hadolint says of a Dockerfile, empty for nothing; None where it is not there."""
    program = shutil.which("hadolint")
    if program is None:
        return None
    done = subprocess.run(
        [program, "--no-color", "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=LINT_S,
        check=False,
    )
    return (done.stdout + done.stderr).strip()


def _kind(machine: Machine, cuda: str | None, *, is_rocm: bool) -> tuple[str, str]:
    """Return the kind of container and the version of CUDA or ROCm in it."""
    if cuda is not None:
        if not VERSION.fullmatch(cuda):
            raise UserError(f"{cuda!r} is no CUDA version; write it as 12.8")
        return "cuda", cuda
    hip, own_cuda = machine.facts.get("torch_hip"), machine.facts.get("torch_cuda")
    if is_rocm or hip:
        return "rocm", _short(str(hip)) if hip else ROCM_VERSION
    return ("cuda", _short(str(own_cuda))) if own_cuda else ("cpu", "")


def _check_cuda(version: str, torch_version: str) -> None:
    """Refuse what would be found missing only when the container is built."""
    if version not in CUDA_IMAGES:
        raise UserError(
            f"no image is known for CUDA {version}; "
            f"with --cuda give one of {', '.join(CUDA_IMAGES)}"
        )
    first, last = CUDA_WHEELS[version]
    own = tuple(int(part) for part in RELEASE.findall(torch_version)[:2])
    if own and (own < first or (last is not None and own > last)):
        fitting = [
            known
            for known, (since, until) in CUDA_WHEELS.items()
            if since <= own and (until is None or own <= until)
        ]
        raise UserError(
            f"torch {torch_version.partition('+')[0]} has no wheels for CUDA {version}; "
            f"with --cuda give one of {', '.join(fitting)}"
        )


def _image(kind: str, version: str, python: str) -> str:
    if kind == "cuda":
        return f"nvidia/cuda:{CUDA_IMAGES[version]}"
    if kind == "rocm":
        return ROCM_IMAGE.format(version=version)
    return f"python:{python}-slim-bookworm"


def _build(kind: str, version: str) -> str:
    """Return torch's name of a build.

    >>> _build("cuda", "12.8"), _build("rocm", "6.4"), _build("cpu", "")
    ('cu128', 'rocm6.4', 'cpu')
    """
    if kind == "cuda":
        return f"cu{version.replace('.', '')}"
    return f"rocm{version}" if kind == "rocm" else "cpu"


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
