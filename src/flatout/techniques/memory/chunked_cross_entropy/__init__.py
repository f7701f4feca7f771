"""Compute cross-entropy a slice of rows at a time.

What it does: of a large table of logits, `cross_entropy` keeps a number per row instead of a
probability per entry, and makes the gradient slice by slice.
When it helps: language models, whose logits are larger than their activations: less memory, and
fewer passes over it.
What it costs: the softmax is computed twice.
How it is checked: losses and gradients match torch's up to rounding.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.agent import patching
from flatout.analysis.stream_changes import SOFTMAX, activation_size, loss_indices
from flatout.hardware.catalogue import model_of
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.memory_stream import Draft, MemoryStream, Phase
from flatout.records.profile import Profile
from flatout.records.technique import (
    Effect,
    MemoryOption,
    Numerics,
    Rescue,
    RunningTraining,
    Switch,
    Technique,
    case_of,
    process_state,
)
from flatout.records.units import MIB
from flatout.techniques.memory_pressure import is_tight, peak_bytes

if TYPE_CHECKING:
    import torch

SLICE_BYTES = 16 * 2**20
"""Of a slice in fp32: some 80 rows of GPT-2's vocabulary. Small alongside any table worth slicing.
"""
MIN_CLASSES = 4096
"""Of the widest layer, for the technique to be offered: fewer are seldom a vocabulary."""
TABLES_SAVED = 2
"""Of the four at the peak (logits, log-probabilities, two gradients) logits and one gradient
remain."""
TABLES_HELD = 4
"""At that peak: no table can be larger than what was held, by so much."""
PASSES_SAVED = 3
"""Times that the table crosses the memory. Torch's own: log-softmax reads and writes one, backward
writes the gradient of the loss, reads it and the probabilities, and writes that of the logits: 6
(its kernels). Sliced: forward reads one, backward reads and writes one: 3; slices stay in a cache.
"""
CPU_BYTES_PER_S = 10e9
"""What a CPU gives tables in fresh memory, where no one measured it: assumed; a gain of 22 ms for a
table of 41 MB, as in the record of levers_text, is 6e9 on two cores."""
LEAST_SHARE = 0.02
"""Of the step that has to be saved, for the technique to be offered where memory is not tight: less
could not be shown."""
SHRINKS = 5
"""Times that a GPU's step in fp32 may get shorter by low precision and fused attention: 368 to
74 ms on an H200 (measured)."""
TOKEN_BYTES = 16
"""Of a batch for each token: its number and its target, 8 bytes each."""
NONE_CALLED = "no cross-entropy of classes over {mib} MiB of logits or more was called"
CHUNKS = 8
"""Parts of the loss in a plan."""
LARGE_LOSS = 0.05
"""The loss is worth a chunked one where its logits are this share of all activations."""
LOSS_BACKWARD = "nll_loss_backward"
"""The operator that makes the gradient of the log-probabilities."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedCrossEntropy(Technique):
    """Compute cross-entropy a slice of rows at a time."""

    addresses: ClassVar[frozenset[str]] = frozenset(
        {"out_of_memory", "forward", "backward", "other"}
    )
    numerics: ClassVar[Numerics] = Numerics.ROUNDING
    rescues: ClassVar[tuple[Rescue, ...]] = (Rescue(cost=0.01),)
    by_hand: ClassVar[str] = """
Where the last linear layer makes the logits for this loss and nothing else:
torch's own function, in the versions that have it, does without them altogether.
- loss = F.cross_entropy(head(hidden), targets)
+ options = torch.nn.LinearCrossEntropyOptions()
+ loss = F.linear_cross_entropy(hidden, head.weight, targets, options=options)
"""

    min_mib: int = 32
    """Tables of logits below this many MiB keep torch's own function."""
    sliced: set[tuple[int, int]] = process_state(set)
    """Rows and classes of the tables that were sliced."""
    undo: list[Callable[[], None]] = process_state(list)
    """What puts torch's function back."""

    def __post_init__(self) -> None:
        if self.min_mib < 0:
            raise ValueError(f"min_mib={self.min_mib} must not be negative")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ChunkedCrossEntropy"]:
        """Return the technique for wide last layers: memory is tight, or large tables take time."""
        is_wide = any(model.widest_output >= MIN_CLASSES for model in profile.models)
        found = cls()
        is_large = table_bytes(profile) >= found.min_mib * MIB
        is_slow = is_large and saved_ms(profile, machine) > 0
        return [found] if is_wide and (is_slow or is_tight(profile, machine)) else ()

    @classmethod
    def memory_options(cls) -> Sequence[MemoryOption]:
        """Return what it makes of a traced step."""
        return [
            MemoryOption(
                why="the probabilities of all tokens never exist at once",
                change=chunked_loss,
                helps=lambda stream, _: has_large_loss(stream),
            )
        ]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect two of four tables of logits gone, and three passes over one saved."""
        rows, widest = table_of(profile)
        return Effect(
            step_ms=-saved_ms(profile, machine),
            peak_bytes=-TABLES_SAVED * 4 * widest * max(1, rows),
            why=f"two tables less: {rows} x {widest}, rows guessed from the batch's bytes",
        )

    def start(self) -> None:
        """Replace the function before the script imports it."""
        self.undo.append(install(self.min_mib * MIB, self.sliced))

    def switch(self, training: RunningTraining) -> Switch:
        """Choose between torch's function and this one, as far as a script looks it up."""

        def turn(is_on: bool) -> None:  # noqa: FBT001  called by position
            if is_on:
                self.start()
            while self.undo and not is_on:
                self.undo.pop()()

        def check() -> None:
            if not self.sliced:
                raise NotApplicable(NONE_CALLED.format(mib=self.min_mib))

        return Switch(turn=turn, check=check)

    def end(self) -> str:
        """Put torch's function back; tell how large the tables were."""
        while self.undo:
            self.undo.pop()()
        largest = max(self.sliced, key=lambda shape: shape[0] * shape[1], default=None)
        self.sliced.clear()
        if largest is None:
            raise NotApplicable(NONE_CALLED.format(mib=self.min_mib))
        return f"{largest[0]} x {largest[1]} logits, sliced"


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


def saved_ms(profile: Profile, machine: Machine) -> float:
    """Return what fewer passes over a step's tables save, 0 where that could not be shown."""
    tables = table_bytes(profile) * max(1.0, profile.backwards_per_step)
    found = 1e3 * PASSES_SAVED * tables / memory_bytes_per_s(profile, machine)
    # What other techniques leave of the step decides whether it shows.
    left = 1 / SHRINKS if case_of(profile) == "cuda" else 1.0
    return found if found >= LEAST_SHARE * left * profile.step_ms.median else 0.0


def memory_bytes_per_s(profile: Profile, machine: Machine) -> float:
    """Return the rate of the memory that the training uses: measured, of a data sheet, assumed."""
    if profile.limits is not None and profile.limits.memory_bytes_per_s:
        return profile.limits.memory_bytes_per_s
    if profile.device_kind == "cpu":
        return CPU_BYTES_PER_S
    return model_of(machine.device).bandwidth


def install(min_bytes: int = 0, sliced: set[tuple[int, int]] | None = None) -> Callable[[], None]:
    """Let `torch.nn.functional.cross_entropy` slice large tables; return what takes that back.

    Args:
        min_bytes: Of a table.
        sliced: Where rows and classes of the tables are noted.
    """
    import torch.nn.functional as functions

    note = (sliced if sliced is not None else set()).add
    lean = functools.partial(_lean_loss, min_bytes=min_bytes, note=note)
    return patching.wrap(functions, "cross_entropy", lean, order=patching.Order.TECHNIQUE).undo


def _lean_loss(
    original: Callable[..., Any], min_bytes: int, note: Callable[[tuple[int, int]], None]
) -> Callable[..., Any]:
    import torch

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
        if torch.compiler.is_compiling() or _is_transformed():
            return original(input, target, **options)
        if _is_plain(options) and _is_table(input, target, min_bytes):
            note((input.shape[0], input.shape[1]))
            return chunked_cross_entropy(
                input, target, ignore_index=ignore_index, reduction=reduction
            )
        return original(input, target, **options)

    # `torch.jit.script` compiles torch's own.
    cross_entropy.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]
    return cross_entropy


def _is_transformed() -> bool:
    """Return whether functorch or a tracer follows each operation, and knows none of ours."""
    import torch

    return torch._C._is_tracing() or torch._C._functorch.maybe_current_level() is not None


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

    from flatout.techniques.memory.chunked_cross_entropy.sliced_loss import ROW_LOSS

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
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.dtype != torch.int64:
        return False
    is_float = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    size = logits.numel() * logits.element_size()
    return is_float and logits.requires_grad and size >= max(min_bytes, 1)


def chunked_loss(stream: MemoryStream, chunks: int = CHUNKS) -> MemoryStream:
    """The loss is computed a few rows at a time.

    Log-probabilities and their gradient exist in parts. The logits, of which torch's own loss keeps
    nothing, stay until backward, and so does their gradient.
    """
    draft = Draft(stream)
    logits: int | None = None
    for index in loss_indices(stream):
        allocation = stream.allocations[index]
        is_softmax = SOFTMAX in allocation.operator and allocation.phase is Phase.FORWARD
        if is_softmax or LOSS_BACKWARD in allocation.operator:
            draft.resize(index, -(-allocation.size // chunks))
        if is_softmax and logits is not None:
            _live_as_long(draft, logits, index)
        logits = index
    return draft.build()


def _live_as_long(draft: Draft, index: int, other: int) -> None:
    """Let an allocation live at least until another one dies."""
    own, wanted = draft.lives[index].death, draft.lives[other].death
    if own is not None and (wanted is None or own < wanted):
        draft.die_before(index, wanted)


def has_large_loss(stream: MemoryStream) -> bool:
    """Return whether the loss holds a share of the activations that is worth a chunked one."""
    allocations = (stream.allocations[index] for index in loss_indices(stream))
    size = sum(each.size for each in allocations if SOFTMAX in each.operator)
    return size > LARGE_LOSS * activation_size(stream) > 0


KOREAN = """
Compute cross-entropy a slice of rows at a time.
    교차 엔트로피를 행을 나누어 계산합니다.
Where the last linear layer makes the logits for this loss and nothing else:
    마지막 선형 층의 로짓을 이 손실에만 쓰는 곳:
torch's own function, in the versions that have it, does without them altogether.
    torch의 함수는, 있는 버전에서는, 로짓을 아예 만들지 않습니다.
the probabilities of all tokens never exist at once
    모든 토큰의 확률을 한꺼번에 만들지 않습니다
two tables less: {rows} x {classes}, rows guessed from the batch's bytes
    {rows} x {classes} 크기의 표가 두 개 줄어듭니다. 행 수는 배치의 바이트로 추정했습니다
no cross-entropy of classes over {mib} MiB of logits or more was called
    로짓이 {mib} MiB 이상인 교차 엔트로피 호출이 없었습니다
{rows} x {classes} logits, sliced
    {rows} x {classes} 로짓을 나누어 계산했습니다
"""
