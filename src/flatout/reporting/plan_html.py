"""A plan as one HTML file: nothing is loaded and nothing runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.core.plan import Plan
from flatout.core.units import format_bytes
from flatout.reporting import plan_words as words
from flatout.reporting.templates import render

WIDTH, HEIGHT = 1000.0, 260.0
HEADROOM = 1.04
MOST_RUNGS = 20
ORDER = (
    *("parameters", "buffers", "optimizer", "gradients"),
    *("inputs", "activations", "temporaries", "workspace"),
)
"""From the ground up: what stays lies below what comes and goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One component of the curve."""

    name: str
    points: str
    """Of a polygon."""


def plan_html(plan: Plan, *, workload: str, gpu: str = "") -> str:
    """Return the page: the answer, the curve of two steps, the tables.

    Args:
        plan: what was predicted.
        workload: the target with its arguments, as the user types it.
        gpu: the device as the user named it.
    """
    return render(
        "plan.html.j2",
        {
            "headline": words.headline(plan),
            "fits": plan.fits,
            "workload": workload,
            "device": plan.device,
            "facts": [
                ("used", words.used_words(plan)),
                ("peak", words.peak_words(plan)),
                ("largest batch", words.batch_words(plan)),
                ("to keep it", words.keep_words(plan)),
                ("classic formula", words.formula_words(plan)),
                ("checked", plan.checked),
            ],
            "width": WIDTH,
            "height": HEIGHT,
            "layers": layers(plan),
            "phases": phase_lines(plan),
            "capacity_y": _capacity_y(plan),
            "top": format_bytes(_top(plan) / HEADROOM),
            "capacity": format_bytes(plan.capacity_bytes),
            "told": f"Allocated bytes over the traced steps: {words.peak_words(plan)}.",
            "components": words.component_rows(plan),
            "tensors": words.tensor_rows(plan.largest, len(plan.largest)),
            "rungs": words.rung_rows(plan, MOST_RUNGS),
            "whys": [(words.choice_words(rung), rung.why) for rung in plan.ladder if rung.choices],
            "notes": plan.notes,
            "next_command": words.next_command(plan, workload, gpu),
        },
    )


def layers(plan: Plan) -> list[Layer]:
    """Return the components as stacked polygons, from the ground up."""
    if len(plan.timeline) < 2:
        return []
    across, top = _across(plan), _top(plan)
    ground = [0] * len(plan.timeline)
    found = []
    for name in (name for name in ORDER if name in plan.parts):
        roof = [below + own for below, own in zip(ground, plan.parts[name], strict=True)]
        upper, lower = _line(across, roof, top), _line(across, ground, top)
        found.append(Layer(name=name, points=" ".join([*upper, *reversed(lower)])))
        ground = roof
    return found


def phase_lines(plan: Plan) -> list[tuple[float, str]]:
    """Return where each phase begins, and its name; of one that lasts no time nothing."""
    if len(plan.timeline) < 2:
        return []
    end = plan.timeline[-1][0] or 1
    starts = [(at, f"{phase} {step + 1}") for at, phase, step in plan.phases if phase != "setup"]
    kept = [
        (at, name)
        for (at, name), (later, _) in zip(starts, [*starts[1:], (end, "")], strict=True)
        if later - at > end / 50
    ]
    return [(round(WIDTH * at / end, 1), name) for at, name in kept]


def _across(plan: Plan) -> list[float]:
    end = plan.timeline[-1][0] or 1
    return [WIDTH * at / end for at, _count in plan.timeline]


def _top(plan: Plan) -> float:
    return HEADROOM * max([1, *(count for _at, count in plan.timeline)])


def _capacity_y(plan: Plan) -> float | None:
    """Return the height of the device's memory, where it is inside the drawing."""
    share = plan.capacity_bytes / _top(plan)
    return round(HEIGHT * (1 - share), 1) if share <= 1 else None


def _line(across: Sequence[float], counts: Sequence[int], top: float) -> list[str]:
    return [
        f"{x:.1f},{HEIGHT * (1 - count / top):.1f}" for x, count in zip(across, counts, strict=True)
    ]
