"""Evaluation builds the graphs that only a backward needs."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

IN_PROJECT = ("MEM02",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report calls in evaluation mode with gradients on, where nothing goes back through them."""
    calls = sum(model.eval_graph_calls for model in profile.models)
    share = profile.eval_ms / profile.step_ms.median if profile.step_ms.median else 0.0
    is_apart = share <= 0
    share = share or profile.eval_share
    if not calls or share <= 0 or profile.backwards_per_step > profile.batches_per_step:
        return None
    return Finding(
        code="evaluation_graph",
        share=min(1.0, share),
        of="run" if is_apart else "step",
        is_bound=not is_apart,
        because=words(
            f"finding.evaluation_graph.because{'_apart' * is_apart}",
            n=str(calls),
            time=format_share(share) if is_apart else format_ms(profile.eval_ms),
        ),
        next=words("finding.evaluation_graph.next"),
        evidence={
            "calls": float(calls),
            "eval_ms": profile.eval_ms,
            "eval_share": profile.eval_share,
        },
    )
