"""A Stack: what a container has to hold so that a training runs as it was measured."""

from dataclasses import dataclass
from pathlib import PurePosixPath

ARCHIVES = (".whl", ".tar.gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The software of one measurement, ready to be written as a Dockerfile."""

    kind: str
    """`cpu`, `cuda` or `rocm`."""
    torch: str
    """Version of torch, without the build's suffix."""
    index: str
    """Package index that has this build of torch."""
    python: str
    """Version that was measured, as `3.12`: the image has it."""
    flatout: str
    """Version that wrote the file."""
    shm_gib: int
    """Shared memory for the batches of loader workers."""
    recipe: str = ""
    """File name of the recipe, beside the Dockerfile; empty for none."""
    source: str = ""
    """What flatout is installed from: a wheel or a folder beside the Dockerfile, or an address."""
    extras: tuple[str, ...] = ()
    """Extras of flatout that the recipe's levers need."""
    requirements: str = ""
    """File name of the script's own requirements, beside the Dockerfile; empty for none."""
    script: str = "train.py"
    about: str = ""
    """Where the stack was measured."""

    @property
    def is_copied(self) -> bool:
        """Whether flatout lies beside the Dockerfile."""
        return bool(self.source) and "://" not in self.source

    @property
    def copy_of_source(self) -> str:
        """Where flatout lies in the container; pip wants a wheel's own name."""
        name = PurePosixPath(self.source).name
        return f"/opt/{name if name.endswith(ARCHIVES) else 'flatout'}"

    @property
    def requirement(self) -> str:
        """What pip is told to install."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        if self.is_copied:
            return f"{self.copy_of_source}{extras}"
        return f"flatout{extras} @ {self.source}"
