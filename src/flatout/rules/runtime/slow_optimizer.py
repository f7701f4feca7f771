"""The optimizer takes a large part of the step."""

from collections import Counter

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import joined, words
from flatout.records.profile import OptimizerFacts, Profile
from flatout.records.units import format_ms, format_share

MENDED_BY = frozenset({"fused_optimizer", "foreach_optimizer"})
"""With one of them in use its facts are those of the script, and of neither is it to be advised."""
MIN_SHARE = 0.10
"""Below a tenth of the step, a faster update is not worth a reader's time."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the optimizer when its update is at least `MIN_SHARE` of the step."""
    share = profile.share("optimizer")
    if share < MIN_SHARE:
        return None
    optimizer_ms, step_ms = profile.phases_ms["optimizer"], profile.step_ms.median
    tensors = sum(facts.parameter_tensors for facts in profile.optimizers)
    kinds = Counter(_describe(facts) for facts in profile.optimizers)
    names = tuple(
        words("finding.slow_optimizer.several", n=str(count), kind=kind) if count > 1 else kind
        for kind, count in kinds.items()
    )
    is_several = len(profile.optimizers) > 1
    return Finding(
        code="slow_optimizer",
        share=share,
        because=words(
            f"finding.slow_optimizer.{'because_several' if is_several else 'because'}",
            names=joined(*names, joint="joint.with")
            if names
            else words("finding.slow_optimizer.unknown"),
            time=format_ms(optimizer_ms),
            step=format_ms(step_ms),
            share=format_share(share),
            n=str(profile.step_ms.n),
        ),
        next=_next(profile.optimizers, profile.device_kind),
        evidence={
            "optimizer_ms": optimizer_ms,
            "step_ms": step_ms,
            "parameter_tensors": float(tensors),
        },
    )


def _describe(facts: OptimizerFacts) -> str:
    name = "kind_fused" if facts.is_fused else "kind"
    tensors = str(facts.parameter_tensors)
    return words(f"finding.slow_optimizer.{name}", name=facts.name, n=tensors)


def _next(optimizers: tuple[OptimizerFacts, ...], device_kind: str) -> str:
    slow = [facts for facts in optimizers if not facts.is_fused]
    if any(facts.has_fused_option for facts in slow):
        command = "flatout tune --only fused_optimizer train.py"
        return words("finding.slow_optimizer.next_fused", command=command)
    in_groups = [facts for facts in slow if facts.has_foreach_option]
    if any(facts.is_foreach is False for facts in in_groups):
        return words("finding.slow_optimizer.next_one_by_one")
    # Left to torch, it goes by groups on CUDA, and from tensor to tensor on the CPU.
    if device_kind == "cpu" and any(facts.is_foreach is None for facts in in_groups):
        command = "flatout tune --only foreach_optimizer train.py"
        return words("finding.slow_optimizer.next_groups", command=command)
    return words("finding.slow_optimizer.next_nothing")
