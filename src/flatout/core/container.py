"""A Stack: what a container has to hold so that a training runs as it was measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The software of one measurement, ready to be written as a Dockerfile."""

    kind: str
    """`cpu`, `cuda` or `rocm`."""
    image: str
    """Image to start from."""
    torch: str
    """Version of torch, without the build's suffix."""
    index: str
    """Package index that has this build of torch."""
    python: str
    """Version that was measured, as `3.12`."""
    image_python: str
    """Version that the image has."""
    allocator_package: str
    """Package of tcmalloc in the image's distribution."""
    flatout: str
    shm_gib: int
    """Shared memory for the batches of loader workers."""
    recipe: str = ""
    """File name of the recipe, beside the Dockerfile; empty for none."""
    requirements: str = ""
    """File name of the script's own requirements, beside the Dockerfile; empty for none."""
    script: str = "train.py"
    about: str = ""
    """Where the stack was measured."""
