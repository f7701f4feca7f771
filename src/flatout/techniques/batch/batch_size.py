"""Train with larger batches, as far as each doubling makes the samples cheaper.

What it does: gives the training loader a larger batch and multiplies the learning rate by the rule
of its optimizer (linear for SGD, square root for Adam), reached over a warm-up.
When it helps: the device waits for launches, or the optimizer is a good part of the step.
What it costs: memory; another training: fewer, larger steps. The result has to be looked at again.
How it is checked: it changes the training on purpose, so losses are looked at for damage only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import LoaderFacts, Profile
from flatout.records.technique import Effect, Numerics, Technique, process_state

if TYPE_CHECKING:
    import torch

Rule = Literal["keep", "linear", "sqrt"]

MIN_STEPS = 8
"""An epoch of fewer steps is no training by steps any more."""
MEMORY_SHARE = 0.85
"""Share of the device's memory that a larger batch may be predicted to take."""
BYTES_PER_PARAMETER = 16
"""Weights, gradients and two states of Adam in fp32: what does not grow with the batch."""
FIXED_SHARE = {"cuda": 0.3, "cpu": 0.05}
"""Share of forward and backward that a larger batch does not make longer, where a trace did not
tell: launches on a GPU, overhead of operators on a CPU. Assumptions."""
WARM_UP_STEPS = 100
"""Steps over which the learning rate goes to its new value: an assumption; Goyal et al. took five
epochs of ImageNet."""
KEPT = "the loss is a sum of samples, whose gradients grow with the batch alone: rates were kept"
RAMPED = "flatout_warm_up_steps"
"""Where a group, and so a checkpoint, keeps how many steps of the warm-up are made."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize(Technique):
    """Train with larger batches and a learning rate to match."""

    addresses: ClassVar[frozenset[str]] = frozenset(
        {"data_wait", "h2d", "forward", "backward", "optimizer", "other"}
    )
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    by_hand: ClassVar[str] = """
Where the loader and the optimizer are made:
+ loader = DataLoader(..., batch_size=$samples)
+ lr = lr * ($samples / $instead_of), for Adam its square root
Reach that learning rate over the first $warm_up_steps steps.
Leave it as it is where the loss is a sum over the batch and no mean.
"""

    samples: int = 64
    """Samples of a batch."""
    instead_of: int = 32
    """The script's own batch size; loaders of another size stay as they are."""
    learning_rate: Rule = "keep"
    """`linear` with the batch, with its square root (`sqrt`), or as it is (`keep`)."""
    warm_up_steps: int = WARM_UP_STEPS
    enlarged: list[int] = process_state(list)
    """The batches that loaders of this process were given."""
    sums: list[bool] = process_state(list)
    """Holds something once the loss was seen to be a sum of its samples."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.instead_of < 1:
            raise ValueError("samples and instead_of are numbers of samples, at least 1")
        if self.warm_up_steps < 0:
            raise ValueError(f"warm_up_steps={self.warm_up_steps} is negative; give 0 for none")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["BatchSize"]:
        """Return twice the present batch, where it fits: the knee is where doubling stops paying.

        The ladder keeps a doubling only when it made the samples cheaper, and asks again then.
        """
        loader = next((one for one in profile.training_loaders if one.batch_size), None)
        if loader is None or len(profile.training_loaders) != 1:
            return ()
        own = loader.batch_size or 1
        wanted = 2 * max(own, present_size(profile, loader))
        steps = (loader.dataset_len or math.inf) / wanted
        if steps < MIN_STEPS or not fits(profile, machine, wanted / present_size(profile, loader)):
            return ()
        names = [optimizer.name for optimizer in profile.optimizers]
        return [cls(samples=wanted, instead_of=own, learning_rate=rule_for(names))]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect what does not depend on the batch to be paid for more samples at once."""
        loader = next((one for one in profile.training_loaders if one.batch_size), None)
        if loader is None:
            return Effect(why="no loader with a batch size feeds the training")
        factor = self.samples / present_size(profile, loader)
        fixed_ms = fixed_cost_ms(profile)
        dynamic = max(0, growing_bytes(profile))
        return Effect(
            step_ms=-fixed_ms * (1 - 1 / factor),
            peak_bytes=int((factor - 1) * dynamic),
            why=f"{fixed_ms:.1f} ms of a step do not depend on the batch, {factor:.0f}x of it",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give the loader the larger batch."""
        if arguments.get("batch_sampler") is not None:
            raise NotApplicable("the script makes its batches itself, with a batch_sampler")
        if arguments.get("batch_size") != self.instead_of:
            raise NotApplicable(
                f"the loader's batch is {arguments.get('batch_size')}, not {self.instead_of}"
            )
        length = _length(arguments.get("dataset"))
        if length is not None and length < MIN_STEPS * self.samples:
            raise NotApplicable(f"an epoch would have fewer than {MIN_STEPS} steps")
        self.enlarged.append(self.samples)
        return {**arguments, "batch_size": self.samples}

    def optimizer(self, optimizer: Any) -> Any:
        """Multiply the learning rate at each step, whatever a schedule makes of it.

        Only once a loader has the larger batch: it may be made after the optimizer, or not at all.
        """
        from flatout.agent import optimizer_swap

        factor = rate_factor(self.samples / self.instead_of, self.learning_rate)
        if factor != 1:
            if any(group.get("lr") is None for group in optimizer.param_groups):
                raise NotApplicable("the optimizer chooses its rate itself: none can be multiplied")
            optimizer_swap.need(optimizer, "batch_size, which multiplies the rate in each step,")
            scale_rate(optimizer, factor, self.warm_up_steps, is_due=self._is_due)
        return optimizer

    def backward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Look at the first loss: of a sum the gradients have grown with the batch already."""
        from flatout.agent import patching

        def look(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            with suppress(Exception):  # a look must never end the training
                if is_sum(tensors, self.samples):
                    self.sums.append(True)
            return call(tensors, *args, **kwargs)

        return patching.at_first_call(call, look) if self.learning_rate == "linear" else call

    def end(self) -> str:
        """Say that rates were kept, if they were."""
        return KEPT if self.enlarged and self.sums else ""

    def _is_due(self) -> bool:
        return bool(self.enlarged) and not self.sums


def scale_rate(
    optimizer: "torch.optim.Optimizer",
    factor: float,
    warm_up_steps: int = 0,
    *,
    is_due: Callable[[], bool] = lambda: True,
) -> "torch.optim.Optimizer":
    """Multiply an optimizer's learning rates inside its steps, on a ramp from 1 to `factor`.

    Outside of a step the rates are the script's own, so that schedules and logs go on as before. A
    training that goes on from a checkpoint goes on with the ramp, too. While `is_due` says no, the
    rates stay as they are.
    """
    from flatout.agent.optimizer_swap import act_around_steps

    own: list[Any] = []

    def before(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        groups = optimizer.param_groups
        own[:] = [group["lr"] for group in groups]
        if not groups or not is_due():  # none where another technique makes this step itself
            return
        # Of all groups: one that is added later is no reason to begin again.
        count = min(warm_up_steps, max(group.get(RAMPED, 0) for group in groups)) + 1
        now = 1 + (factor - 1) * count / (warm_up_steps + 1)
        for group in groups:
            group["lr"], group[RAMPED] = group["lr"] * now, count

    def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, own, strict=False):
            group["lr"] = rate

    act_around_steps(optimizer, before, after)
    return optimizer


def is_sum(loss: Any, samples: int) -> bool:
    """Return whether a loss adds its samples up: nothing divides it by so many, or by more."""
    from flatout.parallel.loss_form import SUM, forms_of

    if getattr(loss, "grad_fn", None) is None:
        return False
    form = forms_of(loss, samples)
    factors = [pair for term in form.sums for pair in term]
    divisors = (abs(x) if name.startswith("Div") else 1 / abs(x) for name, x in factors if x)
    return form.forms == {SUM} and all(divisor < samples for divisor in divisors)


def rate_factor(batch_factor: float, rule: Rule) -> float:
    """Return what a learning rate is multiplied by when the batch grows.

    >>> rate_factor(4, "linear"), rate_factor(4, "sqrt"), rate_factor(4, "keep")
    (4, 2.0, 1.0)
    """
    return {"linear": lambda: batch_factor, "sqrt": lambda: math.sqrt(batch_factor)}.get(
        rule, lambda: 1.0
    )()


def rule_for(names: Sequence[str]) -> Rule:
    """Return the rule for optimizers by their names: SGD goes linearly, what adapts by the root.

    Goyal et al. 2017 for SGD; Malladi et al. 2022 for Adam and its relatives.

    >>> rule_for(["SGD"]), rule_for(["AdamW"]), rule_for([])
    ('linear', 'sqrt', 'keep')
    """
    if not names:
        return "keep"
    return "linear" if all(name.upper().endswith("SGD") for name in names) else "sqrt"


def present_size(profile: Profile, loader: LoaderFacts) -> int:
    """Return the samples of a batch now, techniques included; a step may train on one again."""
    per_batch = profile.samples_per_step_per_rank / max(1.0, profile.batches_per_step)
    return round(per_batch) or loader.batch_size or 1


def fixed_cost_ms(profile: Profile) -> float:
    """Return the milliseconds of a step that do not depend on the number of samples."""
    launch = profile.regime.shares.get("launch") if profile.regime else None
    compute = profile.share("forward", "backward")
    share = launch if launch is not None else FIXED_SHARE.get(profile.device_kind, 0.0) * compute
    return profile.step_ms.median * min(0.95, share + profile.share("optimizer"))


def growing_bytes(profile: Profile) -> int:
    """Return the part of the peak that grows with the batch: all but weights and states."""
    fixed = BYTES_PER_PARAMETER * sum(model.parameters for model in profile.models)
    return _peak_bytes(profile) - fixed


def fits(profile: Profile, machine: Machine, factor: float) -> bool:
    """Return whether a batch that many times larger is predicted to fit."""
    room = machine.device.memory_bytes if profile.device_kind == "cuda" else machine.memory_bytes
    grown = _peak_bytes(profile) + (factor - 1) * max(0, growing_bytes(profile))
    return grown <= MEMORY_SHARE * room


def _peak_bytes(profile: Profile) -> int:
    peak = profile.peak_bytes
    return peak.reserved if profile.device_kind == "cuda" else peak.device


def _length(dataset: Any) -> int | None:
    measure: Callable[[], int] | None = getattr(dataset, "__len__", None)
    try:
        return measure() if measure else None
    except TypeError:
        return None  # an iterable set that knows no length


KOREAN = """
Train with larger batches and a learning rate to match.
    배치를 키우고 학습률을 그에 맞춥니다.
Where the loader and the optimizer are made:
    로더와 옵티마이저를 만드는 곳:
Reach that learning rate over the first {n} steps.
    처음 {n}스텝에 걸쳐 그 학습률까지 올립니다.
Leave it as it is where the loss is a sum over the batch and no mean.
    손실이 배치의 평균이 아니라 합이면 학습률을 그대로 둡니다.
the loss is a sum of samples, whose gradients grow with the batch alone: rates were kept
    손실이 샘플의 합이라 그래디언트가 배치와 함께 저절로 커지므로 학습률을 그대로 두었습니다
no loader with a batch size feeds the training
    배치 크기가 있는 로더를 학습에 쓰지 않습니다
{ms} ms of a step do not depend on the batch, {factor}x of it
    스텝 중 {ms} ms는 배치 크기와 무관하며 배치를 {factor}배로 키웁니다
the script makes its batches itself, with a batch_sampler
    스크립트가 batch_sampler로 배치를 직접 만듭니다
the loader's batch is {size}, not {other}
    로더의 배치가 {other}이(가) 아니라 {size}입니다
an epoch would have fewer than {n} steps
    한 에폭이 {n}스텝보다 짧아집니다
the optimizer chooses its rate itself: none can be multiplied
    옵티마이저가 학습률을 스스로 정하므로 곱할 학습률이 없습니다
batch_size, which multiplies the rate in each step,
    스텝마다 학습률을 곱하는 batch_size
samples and instead_of are numbers of samples, at least 1
    samples와 instead_of는 1 이상의 샘플 수입니다
warm_up_steps={n} is negative; give 0 for none
    warm_up_steps={n}은(는) 음수입니다. 없으면 0을 주세요
"""
