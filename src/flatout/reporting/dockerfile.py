"""A stack as a Dockerfile."""

import shlex

from flatout.core.container import Stack
from flatout.reporting.tables import ascii_only
from flatout.reporting.templates import render

DEVICES = {
    "cpu": "",
    "cuda": "--gpus all ",
    # As AMD's documentation has it: the two device files, and the groups that may open them.
    "rocm": "--device=/dev/kfd --device=/dev/dri --group-add video --group-add render ",
}
"""What hands the devices into a container."""


def dockerfile(stack: Stack) -> str:
    """Return the Dockerfile; its first lines say how to build and to run it."""
    values = {"stack": stack, "run": ascii_only(run_command(stack))}
    return render("Dockerfile.j2", values)


def run_command(stack: Stack) -> str:
    """Return the command that trains in the container, with the folder it is typed in."""
    script = shlex.quote(" ".join(stack.script.split()))
    return (
        f"docker run --rm {DEVICES[stack.kind]}--shm-size={stack.shm_gib}g "
        '--ulimit memlock=-1 --user "$(id -u):$(id -g)" '
        f'-v "$PWD":/work -v flatout-cache:/cache training {script}'
    )
