"""Compile the whole model with torch.compile.

What it does: compiles the root in place, default mode: same module, same parameters, same keys in
its state_dict.
When it helps: many small operations, each a pass over memory or a kernel launch of its own.
What it costs: compilation in the first steps; shapes that vary compile again, and a training in
which torch gave up compiling, or never stops, is refused.
How it is checked: gradients match eager's up to rounding. Dropout draws other masks.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from flatout.agent.nested import leaves_of, map_leaves
from flatout.analysis.regime import SMALL_WORK_CAUSES, addressable_ms, products_are_known
from flatout.launch.trial_process import scratch_root
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import ModelFacts, Profile
from flatout.records.technique import (
    Effect,
    Numerics,
    RunningTraining,
    SourceForm,
    Switch,
    Technique,
    case_of,
    prior_of,
    process_state,
)
from flatout.techniques.compile.torch_compile.compile_watch import CompileWatch, recorded_graphs

if TYPE_CHECKING:
    import torch

STARTUP_S_PER_MODULE, STARTUP_S_PER_MODULE_CUDA = 0.5, 0.2
"""Cold compilation. A ResNet of some 60 modules took 37 s, a GPT of some 36 modules 12.7 s on 2
cores (measured): 0.35 to 0.6 s for each. For an H200 a GPT-2 of 125 modules took 23 s with 16
cores."""
MIN_LAUNCH_SHARE = 0.02
"""Share of the step that the device waits for launches from which graphs are offered."""
NAME = __name__.rpartition(".")[2]
SAVED_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
OURS = "_flatout_compiled"
"""On a module that a technique of the recipe compiled."""
MAX_SHAPES = 8
"""Torch's recompile limit: beyond it the model silently runs eagerly."""

Mode = Literal["default", "reduce-overhead"]
Shapes = Literal["auto", "dynamic", "lengths"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TorchCompile(Technique):
    """Compile the whole model."""

    excludes_family: ClassVar[bool] = True
    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward"})
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    moves_random_stream: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
Once the model is on its device:
+ model.compile(mode="$mode")
That does nothing for a class of torch.nn, as nn.Sequential: there model = torch.compile(model).
"""
    source: ClassVar[SourceForm | None] = SourceForm(
        model='$model.compile(mode="$mode")',
        needs_own_forward=True,
        only_with={"shapes": "auto"},
    )

    mode: Mode = "default"
    """`reduce-overhead` replays CUDA graphs: one launch for all kernels, for one fixed shape."""
    shapes: Shapes = "auto"
    """`dynamic` compiles one version for every size; `lengths` marks the second dimension of the
    inputs as the one that varies; `auto` finds out at the second size."""
    cache: str = ""
    """A plain name under which what was compiled is kept in `saved/` of flatout's cache folder, for
    a machine that starts without a warm cache: read at the start where it exists, written at the
    end. Empty for none. A recipe may be a stranger's, and torch unpickles what it reads: hence no
    path."""
    watch: CompileWatch = process_state(CompileWatch)
    """Hears of what the compiler gives up."""

    def __post_init__(self) -> None:
        """Refuse a path."""
        if self.cache and not SAVED_NAME.fullmatch(self.cache):
            raise ValueError(
                f"cache={self.cache[:100]!r} is no plain name; give up to 100 letters, digits and "
                "_ - . that do not start with a dot; the file is kept in flatout's cache folder"
            )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["TorchCompile"]:
        """Return the technique for models that no one else compiled, by how their shapes vary."""
        if not profile.models or any(map(is_compiled_elsewhere, profile.models)):
            return ()
        shapes = max(model.input_shapes for model in profile.models)
        by_length = [cls(shapes="lengths")] if shapes > 1 and _is_text(profile) else []
        if shapes > MAX_SHAPES:
            return [cls(shapes="dynamic"), *by_length]
        # Gradients are in the graph's memory: a second backward would overwrite what it adds to.
        is_alone = profile.backwards_per_step <= 1
        is_fixed = profile.device_kind == "cuda" and shapes == 1 and is_alone
        has_graphs = is_fixed and _may_wait_for_launches(profile)
        return [cls(), cls(mode="reduce-overhead")] if has_graphs else [cls(), *by_length]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect what is no product in forward and backward to shrink, after a start-up."""
        graph_ms = graph_saved_ms(profile) if self.mode == "reduce-overhead" else 0.0
        return Effect(
            step_ms=saved_ms(profile) + graph_ms,
            startup_s=startup_s(profile),
            why=f"fused operations in forward and backward, {_speedup(profile):.2f} times faster",
        )

    def start(self) -> None:
        """Take in what an earlier run compiled."""
        if self.cache:
            load_compiled(saved_path(self.cache))

    def model(self, root: Any) -> Any:
        """Compile the root in place."""
        check_compilable(root)
        if self.mode == "reduce-overhead" and not next(root.parameters()).is_cuda:
            raise NotApplicable("CUDA graphs need the model on a CUDA device")
        self.watch.begin()
        compile_in_place(root, mode=self.mode, shapes=self.shapes)
        return root

    def switch(self, training: RunningTraining) -> Switch:
        """Choose between the module as it is and what was compiled of it, ready alongside it."""
        if self.mode == "reduce-overhead" and not next(training.roots[0].parameters()).is_cuda:
            raise NotApplicable("CUDA graphs need the model on a CUDA device")
        for root in training.roots:
            check_compilable(root)
        self.watch.begin()
        turn = compiled_switch(training.roots, self.watch, mode=self.mode, shapes=self.shapes)
        return Switch(turn=turn, call=self.forward, check=self.watch.check, is_last=True)

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """Mark what varies."""
        return with_marked_lengths(call) if self.shapes == "lengths" else call

    def end(self) -> str:
        """Say what was compiled and recorded, unless torch gave it up, and keep it."""
        report = self.watch.report()
        if report and self.mode == "reduce-overhead":
            report += self.watch.graphs_report(recorded_graphs())
        if self.cache:
            report += save_compiled(saved_path(self.cache))
        return report


def with_own_outputs(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call with its outputs copied out of the memory that the next replay writes.

    When that memory is free again is left to torch, which waits for a backward. A mark at each call
    (`cudagraph_mark_step_begin`) would free what an earlier call keeps for a backward to come.
    """
    import torch

    def own(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    def copied(*args: Any, **kwargs: Any) -> Any:
        return map_leaves(call(*args, **kwargs), own)

    return copied


def with_marked_lengths(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call with the second dimension of its inputs marked as one that varies.

    The first compilation is then one for all lengths; without marks it is for the first length
    alone, and a second one finds out. Where the model needs a fixed length, the mark does nothing.
    """
    from torch import Tensor, _dynamo

    @functools.wraps(call)
    def marked(*args: Any, **kwargs: Any) -> Any:
        for leaf in leaves_of((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] > 1:
                _dynamo.maybe_mark_dynamic(leaf, 1)
        return call(*args, **kwargs)

    return marked


def saved_path(name: str) -> Path:
    """Return the file that keeps what was compiled under a name."""
    return scratch_root() / "saved" / name


def load_compiled(path: Path) -> bool:
    """Take in what `save_compiled` kept; say whether there was anything of this torch's."""
    import torch

    if not path.is_file() or not hasattr(torch.compiler, "load_cache_artifacts"):
        return False
    return torch.compiler.load_cache_artifacts(path.read_bytes()) is not None


def save_compiled(path: Path) -> str:
    """Keep what was compiled in this process in one file; return words about it."""
    import torch

    save = getattr(torch.compiler, "save_cache_artifacts", None)
    kept = save() if save is not None else None
    if kept is None:
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(kept[0])
    return f", kept in {path.name}"


def compile_in_place(
    module: "torch.nn.Module", *, mode: Mode = "default", shapes: Shapes = "auto"
) -> None:
    """Compile a module in place: the same object, parameters and keys.

    `module.compile()` silently compiles nothing where `forward` is torch.nn's own, as that of
    Sequential and of TransformerEncoderLayer: the compiler starts at no frame of torch's own files.
    Such a module is called from a frame here.
    """
    import torch

    options: dict[str, Any] = {} if mode == "default" else {"mode": mode}
    module.__dict__[OURS] = True
    if shapes == "dynamic":
        options["dynamic"] = True
    if type(module).forward.__module__.startswith("torch.nn.modules."):
        module._compiled_call_impl = functools.partial(torch.compile(_call, **options), module)
    else:
        module.compile(**options)
    if mode == "reduce-overhead":
        # Inside the module and not around its training calls: evaluation replays graphs too.
        module._compiled_call_impl = with_own_outputs(module._compiled_call_impl)  # type: ignore[arg-type]


def compiled_switch(
    modules: "Sequence[torch.nn.Module]",
    watch: CompileWatch,
    *,
    mode: Mode = "default",
    shapes: Shapes = "auto",
) -> Callable[[bool], None]:
    """Return what switches modules between compiled and not; nothing is compiled before a call.

    What torch gave up while they were off is of another technique.
    """
    ready: list[tuple[torch.nn.Module, Any]] = []

    def turn(is_on: bool) -> None:  # noqa: FBT001  called by position
        watch.gave_up = ""
        if is_on and not ready:
            for module in modules:
                compile_in_place(module, mode=mode, shapes=shapes)
                del module.__dict__[OURS]  # another technique of the screen may be next
                ready.append((module, module._compiled_call_impl))
        for module, compiled in ready:
            module._compiled_call_impl = compiled if is_on else None

    return turn


def _call(module: "torch.nn.Module", *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def check_compilable(model: "torch.nn.Module") -> None:
    """Make sure that nothing of the model is compiled and that this torch can compile."""
    import torch

    for name, module in model.named_modules():
        if _is_compiled(module):
            what = name or "the model"
            if OURS in module.__dict__:
                raise NotApplicable(f"another technique of the recipe compiled {what} already")
            raise NotApplicable(f"the script compiled {what} itself")
    if isinstance(model, torch.nn.RNNBase):
        raise NotApplicable("torch.compile leaves torch.nn's recurrent layers as they are")
    trouble = find_trouble(next((p.device.type for p in model.parameters()), "cpu"))
    if trouble is not None:
        raise NotApplicable(trouble)


def find_trouble(device_type: str) -> str | None:
    """Return why torch.compile cannot work here, or None: CPUs need a compiler, CUDA Triton."""
    try:
        from torch._dynamo.eval_frame import check_if_dynamo_supported

        check_if_dynamo_supported()
        if device_type == "cpu":
            from torch._inductor.cpp_builder import get_cpp_compiler

            get_cpp_compiler()
    except Exception as error:  # noqa: BLE001  whatever is missing, the reason is told
        return f"torch.compile is not available here: {error}"
    if device_type == "cuda" and not _has_triton():
        return "torch.compile needs Triton for CUDA devices; it is not installed"
    return None


def is_compiled_elsewhere(model: ModelFacts) -> bool:
    """Return whether a model was compiled, and not by this technique with other settings."""
    return model.is_compiled and model.compiled_by != NAME


def saved_ms(profile: Profile) -> float:
    """Return the predicted change of the step, negative for faster."""
    if any(model.is_compiled for model in profile.models):
        return 0.0  # by this technique with other settings: it is done already
    # Matrix products are torch's own with and without the compiler.
    compute_ms = addressable_ms(profile, ("forward", "backward"), SMALL_WORK_CAUSES)
    return -compute_ms * (1 - 1 / _speedup(profile))


def graph_saved_ms(profile: Profile) -> float:
    """Return what replaying graphs is predicted to change beyond the compiler, negative."""
    waiting_ms = addressable_ms(profile, ("forward", "backward"), ("launch", "compute"))
    is_fused = any(model.is_compiled for model in profile.models)
    left_ms = waiting_ms if is_fused else waiting_ms / _speedup(profile)
    # Where the waits for launches are known, one launch for all kernels leaves none of them.
    speedup = prior_of(NAME, "graphs").speedup
    return -left_ms if products_are_known(profile) else -left_ms * (1 - 1 / speedup)


def startup_s(profile: Profile) -> float:
    """Return the predicted time of compiling every module once."""
    each_s = STARTUP_S_PER_MODULE_CUDA if profile.device_kind == "cuda" else STARTUP_S_PER_MODULE
    return each_s * sum(model.modules for model in profile.models)


def _speedup(profile: Profile) -> float:
    """Return what fusing is predicted to do to all of forward and backward, or to its part."""
    case = case_of(profile)
    if products_are_known(profile) and case != "cpu_lowered":
        case = "outside_products"
    return prior_of(NAME, case).speedup


def _may_wait_for_launches(profile: Profile) -> bool:
    """Return whether the device waits for launches, as far as anybody looked."""
    launch = profile.regime.shares.get("launch") if profile.regime else None
    return launch is None or launch >= MIN_LAUNCH_SHARE


def _is_text(profile: Profile) -> bool:
    return any(loader.tokenizes or loader.pad_share is not None for loader in profile.loaders)


def _is_compiled(module: "torch.nn.Module") -> bool:
    from torch.jit import ScriptModule

    if isinstance(module, ScriptModule):
        return True
    # The first is what `module.compile()` leaves, the second what `torch.compile(module)` does.
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return bool(has_triton())


KOREAN = """
Compile the whole model.
    모델 전체를 컴파일합니다.
That does nothing for a class of torch.nn, as nn.Sequential: there model = torch.compile(model).
    nn.Sequential처럼 torch.nn의 클래스라면 효과가 없으니 model = torch.compile(model)을 쓰세요.
fused operations in forward and backward, {ratio} times faster
    순전파와 역전파의 연산을 융합해 {ratio}배 빨라집니다
CUDA graphs need the model on a CUDA device
    CUDA 그래프를 쓰려면 모델이 CUDA 디바이스에 있어야 합니다
another technique of the recipe compiled {what} already
    레시피의 다른 기법이 이미 {what}을(를) 컴파일했습니다
the script compiled {what} itself
    스크립트가 {what}을(를) 직접 컴파일했습니다
torch.compile leaves torch.nn's recurrent layers as they are
    torch.compile은 torch.nn의 순환 층을 컴파일하지 않습니다
torch.compile is not available here: {error}
    여기서는 torch.compile을 쓸 수 없습니다: {error}
torch.compile needs Triton for CUDA devices; it is not installed
    torch.compile이 CUDA 디바이스에서 쓰는 Triton이 설치되어 있지 않습니다
cache={name} is no plain name; give up to 100 letters, digits and _ - . that do not start with a
dot; the file is kept in flatout's cache folder
    cache={name}은(는) 파일 이름으로 쓸 수 없습니다. 점으로 시작하지 않는 글자, 숫자, _ - . 를
    100자까지 쓰세요. 파일은 flatout의 캐시 폴더에 둡니다
"""
