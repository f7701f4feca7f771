"""Compute cross-entropy a slice of rows at a time.

What it does: where a last linear layer makes large tables of logits for `cross_entropy` and nobody
else, layer and loss become one that makes the logits of a slice at a time, and in the same pass the
gradients of what the layer takes, of its weight and of its bias. Elsewhere `cross_entropy` keeps a
number per row instead of a probability per entry, and makes the gradient slice by slice.
When it helps: language models, whose logits are larger than their activations: less memory, and
fewer passes over it.
What it costs: the weight's gradient is added to once per slice; without the layer, the softmax is
computed twice.
How it is checked: losses and gradients match up to rounding; the layer's on its first real batch.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.core.errors import NotApplicable
from flatout.core.machine import Machine
from flatout.core.pressure import is_tight, peak_bytes
from flatout.core.profile import Profile
from flatout.core.technique import Effect, Numerics, Technique
from flatout.core.units import MIB
from flatout.hardware.catalogue import model_of

if TYPE_CHECKING:
    import torch

    from flatout.engine.heads import Heads

SLICE_BYTES = 16 * 2**20
"""Of a slice in fp32: some 80 rows of GPT-2's vocabulary. Small beside any table worth slicing."""
MIN_CLASSES = 4096
"""Of the widest layer, for the lever to be offered: fewer are seldom a vocabulary."""
TABLES_SAVED = 2
"""Of the four at the peak (logits, log-probabilities, two gradients) two remain where logits
are there already."""
TABLES_HELD = 4
"""At that peak: no table can be larger than what was held, by so much."""
PASSES_SAVED = 3
"""Times that the table crosses the memory. Torch's own: log-softmax reads and writes one, backward
writes the gradient of the loss, reads it and the probabilities, and writes that of the logits: 6
(its kernels). Sliced: forward reads one, backward reads and writes one: 3; slices stay in a cache.
"""
CPU_BYTES_PER_S = 10e9
"""What a CPU gives tables in fresh memory, where nobody measured it: assumed; a gain of 22 ms for a
table of 41 MB, as in the record of levers_text, is 6e9 on two cores."""
LEAST_SHARE = 0.02
"""Of the step that has to be saved, for the lever to be offered where memory is not tight: less
could not be shown."""
SLICED: set[tuple[int, int]] = set()
"""Rows and classes of the tables that were sliced in this process."""
HEADS: "list[Heads]" = []
"""What became of the last layers of this process, while the lever acts."""
UNDO: list[Callable[[], None]] = []
"""What puts torch's functions back."""
SLICES = 8
"""Of a batch's rows, at most: the weight's gradient is added to once for each."""
TOKEN_BYTES = 16
"""Of a batch for each token: its number and its target, 8 bytes each."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedCrossEntropy(Technique):
    """Compute cross-entropy a slice of rows at a time."""

    family: ClassVar[str] = "memory"
    addresses: ClassVar[frozenset[str]] = frozenset(
        {"out_of_memory", "forward", "backward", "other"}
    )
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    by_hand: ClassVar[str] = """
Where the last linear layer makes the logits for this loss and nothing else, torch's own function
does without them altogether, in the versions that have it:
- loss = F.cross_entropy(head(hidden), targets)
+ options = torch.nn.LinearCrossEntropyOptions()
+ loss = F.linear_cross_entropy(hidden, head.weight, targets, options=options)
"""

    min_mib: int = 32
    """Tables of logits below this many MiB keep torch's own function."""

    def __post_init__(self) -> None:
        if self.min_mib < 0:
            raise ValueError(f"min_mib={self.min_mib} must not be negative")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ChunkedCrossEntropy"]:
        """Return the lever for wide last layers: memory is tight, or large tables take time."""
        is_wide = any(model.widest_output >= MIN_CLASSES for model in profile.models)
        found = cls()
        is_large = table_bytes(profile) >= found.min_mib * MIB
        is_slow = is_large and saved_ms(profile, machine) > 0
        return [found] if is_wide and (is_slow or is_tight(profile, machine)) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the tables of logits gone, or two of four, and three passes over one saved."""
        rows, widest = table_of(profile)
        lean = unmade_bytes(profile)
        kept = TABLES_SAVED * 4 * widest * max(1, rows)
        what = "logits that are never made" if lean > kept else "two tables less"
        return Effect(
            step_ms=-saved_ms(profile, machine),
            peak_bytes=-max(lean, kept),
            why=f"{what}: {rows} x {widest}, rows guessed from the batch's bytes",
        )

    def start(self) -> None:
        """Replace the functions before the script imports them."""
        UNDO.append(install(self.min_mib * MIB))

    def end(self) -> str:
        """Put torch's functions back; tell what became of the logits."""
        while UNDO:
            UNDO.pop()()
        heads = HEADS.pop() if HEADS else None
        sliced = _largest(SLICED)
        SLICED.clear()
        if heads is not None and heads.unmade:
            made = f"; {sliced} logits, sliced" if sliced else ""
            return f"{_largest(heads.unmade)} logits, never made{made}"
        if not sliced:
            raise NotApplicable(
                f"no cross-entropy of classes over {self.min_mib} MiB of logits or more was called"
            )
        why = f": {heads.against[-1]}" if heads is not None and heads.against else ""
        return f"{sliced} logits, sliced{why}"


def _largest(shapes: Iterable[tuple[int, int]]) -> str:
    """Return the largest of some tables in words, empty for none."""
    found = max(shapes, key=lambda shape: shape[0] * shape[1], default=None)
    return "" if found is None else f"{found[0]} x {found[1]}"


def table_of(profile: Profile) -> tuple[int, int]:
    """Return the rows and classes of the logits, as far as the facts tell.

    A batch's bytes are taken for tokens. Where they are pictures, the memory that was held says
    that the table is smaller.
    """
    widest = max((model.widest_output for model in profile.models), default=0)
    rows = sum(loader.batch_bytes for loader in profile.training_loaders) // TOKEN_BYTES
    held = peak_bytes(profile)
    if held and widest:
        rows = min(rows, held // (TABLES_HELD * 4 * widest))
    return rows, widest


def table_bytes(profile: Profile) -> int:
    """Return the bytes of the logits in fp32."""
    rows, widest = table_of(profile)
    return 4 * rows * widest


def logits_bytes(profile: Profile) -> int:
    """Return the bytes of a language model's logits in fp32, 0 where it seems to be none.

    Rows that were cut to what was held were no tokens: what the batch holds is something else.
    """
    models = [model for model in profile.models if model.widest_output >= MIN_CLASSES]
    guessed = sum(loader.batch_bytes for loader in profile.training_loaders) // TOKEN_BYTES
    is_language = bool(models) and table_of(profile)[0] == guessed
    return table_bytes(profile) if is_language else 0


def unmade_bytes(profile: Profile) -> int:
    """Return what goes where the layer and the loss become one, 0 where they cannot.

    Four tables but for two of a slice; the weight's gradient is there beside the parameter's.
    """
    rows, widest = table_of(profile)
    weights = max(
        (m.head_parameters for m in profile.models if m.widest_output == widest), default=0
    )
    is_left_alone = len(profile.ranks) > 1 or any(model.is_compiled for model in profile.models)
    if is_left_alone or not weights or rows * widest < weights:
        return 0
    slices = 4 * widest * -(-rows // SLICES)
    return TABLES_HELD * table_bytes(profile) - 2 * slices - 4 * weights


def saved_ms(profile: Profile, machine: Machine) -> float:
    """Return what fewer passes over a step's tables save, 0 where that could not be shown."""
    tables = table_bytes(profile) * max(1.0, profile.backwards_per_step)
    found = 1e3 * PASSES_SAVED * tables / memory_bytes_per_s(profile, machine)
    return found if found >= LEAST_SHARE * profile.step_ms.median else 0.0


def memory_bytes_per_s(profile: Profile, machine: Machine) -> float:
    """Return the rate of the memory that the training uses: measured, of a data sheet, assumed."""
    if profile.limits is not None and profile.limits.memory_bytes_per_s:
        return profile.limits.memory_bytes_per_s
    if profile.device_kind == "cpu":
        return CPU_BYTES_PER_S
    return model_of(machine.device).bandwidth


def install(min_bytes: int = 0) -> Callable[[], None]:
    """Replace the layer and the loss for large tables; return what takes that back.

    `torch.nn.functional.linear` returns a stand-in for a table of logits, and `cross_entropy` does
    without the table where it is given the stand-in, else slices the table that it is given.
    """
    import torch.nn.functional as functions
    from torch.jit._builtins import _get_builtin_table
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from flatout.engine.heads import Heads
    from flatout.seams.naming import named

    linear, cross_entropy = functions.linear, functions.cross_entropy
    heads = Heads(linear, cross_entropy, min_bytes=min_bytes, least=SLICE_BYTES, most=SLICES)
    late = _late_linear(linear, heads)
    functions.linear = named(late, functions.__name__, "linear")
    functions.cross_entropy = _lean_loss(cross_entropy, heads, min_bytes)
    hook = register_optimizer_step_pre_hook(heads.keep)
    # `torch.jit.script` knows torch's functions by their identity.
    scripted = _get_builtin_table()  # type: ignore[no-untyped-call]
    scripted[id(late)] = "aten::linear"
    HEADS.append(heads)

    def undo() -> None:
        hook.remove()
        scripted.pop(id(late), None)
        functions.linear, functions.cross_entropy = linear, cross_entropy

    return undo


def _late_linear(original: Callable[..., Any], heads: "Heads") -> Callable[..., Any]:
    import torch

    from flatout.engine.late_logits import PLAIN

    @functools.wraps(original)
    def linear(
        input: "torch.Tensor",  # noqa: A002  its name there
        weight: "torch.Tensor",
        bias: "torch.Tensor | None" = None,
    ) -> Any:
        is_known = not torch.compiler.is_compiling() and type(weight) in PLAIN
        if is_known and weight.dim() == 2 and weight.shape[0] >= MIN_CLASSES:
            late = heads.logits(input, weight, bias)
            if late is not None:
                return late
        return original(input, weight, bias)

    return linear


def _lean_loss(original: Callable[..., Any], heads: "Heads", min_bytes: int) -> Callable[..., Any]:
    import torch

    from flatout.engine.late_logits import LateLogits, is_transformed

    @functools.wraps(original)
    def cross_entropy(  # noqa: PLR0913, PLR0917  the arguments of the function it stands for
        input: "torch.Tensor",  # noqa: A002  its name there
        target: "torch.Tensor",
        weight: "torch.Tensor | None" = None,
        size_average: bool | None = None,  # noqa: FBT001
        ignore_index: int = -100,
        reduce: bool | None = None,  # noqa: FBT001
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        options = {
            "weight": weight,
            "size_average": size_average,
            "ignore_index": ignore_index,
            "reduce": reduce,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
        }
        if torch.compiler.is_compiling() or is_transformed():
            return original(input, target, **options)
        if isinstance(input, LateLogits):
            found = heads.loss(input, target, options)
            if found is not None:
                return found
            input = input.made()  # noqa: A001
        if _is_plain(options) and _is_table(input, target, min_bytes):
            SLICED.add((input.shape[0], input.shape[1]))
            return chunked_cross_entropy(
                input, target, ignore_index=ignore_index, reduction=reduction
            )
        return original(input, target, **options)

    # `torch.jit.script` compiles torch's own.
    cross_entropy.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]
    return cross_entropy


def _is_plain(options: Mapping[str, Any]) -> bool:
    unset = options["weight"], options["size_average"], options["reduce"]
    is_known = options["reduction"] in ("mean", "sum", "none")
    return is_known and unset == (None, None, None) and not options["label_smoothing"]


def chunked_cross_entropy(
    logits: "torch.Tensor",
    target: "torch.Tensor",
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    slice_bytes: int = SLICE_BYTES,
) -> "torch.Tensor":
    """Return `cross_entropy(logits, target)` for logits of rows by classes.

    Computed in fp32; the gradient has the logits' precision. It cannot be differentiated twice.
    """
    import torch

    from flatout.engine.cross_entropy import ROW_LOSS

    rows = max(1, slice_bytes // (4 * logits.shape[1]))
    losses = ROW_LOSS(logits, target, ignore_index, rows)
    # Torch computes it in fp32 under autocast, and in the logits' precision without.
    dtype = torch.float32 if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    if reduction == "mean":
        losses = losses.sum() / (target != ignore_index).sum()
    elif reduction == "sum":
        losses = losses.sum()
    result: torch.Tensor = losses.to(dtype)
    return result


def _is_table(logits: Any, target: Any, min_bytes: int) -> bool:
    import torch

    if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    if type(logits) not in (torch.Tensor, torch.nn.Parameter) or not torch.is_grad_enabled():
        return False
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.is_floating_point():
        return False
    is_float = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    size = logits.numel() * logits.element_size()
    return is_float and logits.requires_grad and size >= max(min_bytes, 1)
