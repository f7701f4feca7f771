"""Evaluation builds the graphs that only a backward needs."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms

IN_PROJECT = ("MEM02",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report calls in evaluation mode with gradients on, where nothing goes back through them."""
    del machine
    calls = sum(model.eval_graph_calls for model in profile.models)
    share = profile.eval_ms / profile.step_ms.median if profile.step_ms.median else 0.0
    if not calls or share <= 0 or profile.backwards_per_step > profile.batches_per_step:
        return None
    return Finding(
        code="evaluation_graph",
        share=min(1.0, share),
        is_bound=True,
        because=words(
            "finding.evaluation_graph.because",
            n=str(calls),
            time=format_ms(profile.eval_ms),
        ),
        next=words("finding.evaluation_graph.next"),
        evidence={"calls": float(calls), "eval_ms": profile.eval_ms},
    )
