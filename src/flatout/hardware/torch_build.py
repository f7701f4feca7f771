"""What the installed torch was built for, read from its files: importing torch takes seconds."""

import ast
import importlib.util
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The torch that `import torch` would load."""

    version: str
    """Empty when torch is not installed."""
    cuda: str | None = None
    """CUDA version it was built with; None for a build without CUDA."""
    hip: str | None = None
    """ROCm's HIP version it was built with."""
    folder: Path | None = None

    @property
    def is_cpu_only(self) -> bool:
        """Whether the build cannot use an NVIDIA or AMD GPU whatever the machine has."""
        return self.cuda is None and self.hip is None


def torch_build() -> TorchBuild:
    """Return what is known of the installed torch without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return TorchBuild(version="")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return read_build(folder) or TorchBuild(version=metadata.version("torch"), folder=folder)


def read_build(folder: Path) -> TorchBuild | None:
    """Return the build that `torch/version.py` describes; None where there is no such file."""
    path = folder / "version.py"
    if not path.is_file():
        return None
    constants = _constants(path.read_text())
    return TorchBuild(
        version=constants.get("__version__") or "",
        cuda=constants.get("cuda"),
        hip=constants.get("hip"),
        folder=folder,
    )


def _constants(source: str) -> dict[str, str | None]:
    """Return the module-level names that are bound to a literal text or None."""
    found: dict[str, str | None] = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and (
            value.value is None or isinstance(value.value, str)
        ):
            found |= {t.id: value.value for t in targets if isinstance(t, ast.Name)}
    return found
