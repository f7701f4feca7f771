"""Starved images: what the loader and precision techniques alone bring on few cores."""

from benchmarks.bench import Bench, Record, cells, trials_in
from flatout.records import catalogue
from flatout.records.ablation import Ablation
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_rate, format_share
from flatout.workflow.demo import make_job
from flatout.workflow.tune import TuneOptions, tune

THEME = "starved_images"
FAMILIES = ("compute", "data", "memory", "precision")
"""Loader and precision techniques, and what goes with them: the threads that workers leave, and the
memory format of convolutions."""
LEAST_RATIO = 1.8
CONFIRM_PAIRS = 6


def run(bench: Bench) -> Record:
    """Make the photographs, tune with the loader and precision techniques, confirm."""
    ablation = tune(
        make_job(bench.work),
        TuneOptions(
            out=bench.work / "tune",
            budget_s=bench.budget_s,
            only=levers(),
            confirm_pairs=CONFIRM_PAIRS,
        ),
        bench.tell,
    )
    return Record(
        theme=THEME,
        claim=f"at least {LEAST_RATIO:.1f}x from the loader and precision techniques alone",
        holds=holds(ablation),
        finding=" ".join(confirmed(ablation)[:2]),
        table=rows(ablation),
        raw={"ablation": ablation.to_json(), "trials": trials_in(bench.work)},
        recipe=ablation.recipe,
        ablations=[ablation],
        notes=ablation.notes,
    )


def levers() -> tuple[str, ...]:
    """Return the techniques that the claim is about."""
    families = {name: catalogue.technique_class(name).family for name in catalogue.names()}
    return tuple(name for name, family in families.items() if family in FAMILIES)


def holds(ablation: Ablation) -> bool:
    """Return whether the confirmed ratio reaches the claim."""
    pair = ablation.confirmation
    return bool(ablation.recipe.choices) and pair is not None and pair.ratio >= LEAST_RATIO


def confirmed(ablation: Ablation) -> tuple[str, str, str]:
    """Return ratio, interval and n of the confirmation."""
    return cells(ablation.confirmation) if ablation.confirmation else ("nothing kept", "", "0")


def rows(ablation: Ablation) -> list[tuple[str, ...]]:
    """Return baseline and final recipe, then each kept technique on top of those before it."""
    base, final = ablation.baseline, ablation.final or ablation.baseline
    table: list[tuple[str, ...]] = [
        ("", "step", "samples/s", "data wait", "ratio", "95 % interval", "n"),
        ("baseline", *_profile_cells(base), "1.00x", "", ""),
        (ablation.recipe.label, *_profile_cells(final), *confirmed(ablation)),
    ]
    for row in ablation.kept:
        pair = cells(row.comparison) if row.comparison else ("", "", "")
        others = f" with {', '.join(row.together_with)}" if row.together_with else ""
        table.append(
            (f"+ {row.choice.label}{others}", "", format_rate(row.samples_per_s or 0), "", *pair)
        )
    return table


def _profile_cells(profile: Profile) -> tuple[str, str, str]:
    wait = format_share(profile.share("data_wait"))
    return format_ms(profile.whole_step_ms), format_rate(profile.samples_per_s), wait
