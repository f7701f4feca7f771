"""Train a Task to its end: `python -m flatout.agent.task_runner mytask.py:task`.

To everything else in flatout this is an ordinary script, so a Task goes through the same hook
points.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from flatout.agent.task import Task
from flatout.records.errors import UserError, unknown

USER_ERROR = 2


def main(arguments: list[str]) -> int:
    """Load the task that is named and train it; return the exit code."""
    try:
        if len(arguments) != 1:
            raise UserError("give one task, as in: mytask.py:task")
        task = load_task(arguments[0])
        _train(task)
    except UserError as error:
        sys.stderr.write(f"flatout: {error}\n")
        return USER_ERROR
    return 0


def load_task(target: str) -> Task:
    """Return the task that `file.py:name` names; its file is run as a module of its own folder.

    Raises:
        UserError: if there is no such file or no such task.
    """
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise UserError(f"{target!r} names no task; write file.py:name")
    module = load_module(Path(path))
    found = {key for key, value in vars(module).items() if isinstance(value, Task)}
    if not hasattr(module, name):
        raise UserError(f"{path}: {unknown('Task', name, found)}")
    task = getattr(module, name)
    if not isinstance(task, Task):
        raise UserError(
            f"{path}: {name} is a {type(task).__name__} and not a flatout.Task; "
            f"Tasks there are: {', '.join(sorted(found)) or 'none'}"
        )
    return task


def load_module(path: Path) -> ModuleType:
    """Run a file under its own name, so that loader workers can import what it defines."""
    path = path.resolve()
    if path.stem in sys.modules:
        raise UserError(
            f"{path.name} has the name of a module that is in use; give the file another name"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"{path} is not a Python file")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _train(task: Task) -> None:
    """Train, with one line an epoch, and hand the model over."""
    from flatout.agent.task_loop import training_steps

    last = None
    for step in training_steps(task):
        if last is not None and step.epoch != last.epoch:
            sys.stdout.write(f"{task.name}: epoch {last.epoch} loss {last.loss.item():.4f}\n")
        last = step
    assert last is not None
    sys.stdout.write(
        f"{task.name}: epoch {last.epoch} loss {last.loss.item():.4f}, {last.number} steps\n"
    )
    task.finish(last.model)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
