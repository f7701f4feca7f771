"""Already tuned: flatout must leave it, and say how much could be gained at most."""

from benchmarks.bench import Bench, Record, cells, trials_in
from flatout.records.ablation import Ablation
from flatout.records.units import format_ms, format_ratio
from flatout.workflow.demo import scenarios
from flatout.workflow.tune import TuneOptions, tune

THEME = "already_tuned"


def run(bench: Bench) -> Record:
    """Tune the script that needs no tuning."""
    ablation = tune(
        bench.workload(scenarios() / THEME / "train.py"),
        TuneOptions(out=bench.work / "tune", budget_s=bench.budget_s),
        bench.tell,
    )
    return Record(
        theme=THEME,
        claim="nothing is kept of a script that is tuned already",
        holds=holds(ablation),
        finding=f"kept: {ablation.recipe.label.replace('baseline', 'nothing')}",
        table=rows(ablation),
        raw={"ablation": ablation.to_json(), "trials": trials_in(bench.work)},
        recipe=ablation.recipe,
        ablations=[ablation],
        notes=ablation.notes,
    )


def holds(ablation: Ablation) -> bool:
    """Return whether the tuning went to its end and changed nothing."""
    return ablation.stopped == "finished" and not ablation.recipe.choices


def rows(ablation: Ablation) -> list[tuple[str, ...]]:
    """Return one row per technique that was tried."""
    ceiling = format_ratio(ablation.baseline.ceilings.free_data)
    table: list[tuple[str, ...]] = [
        ("tried", "verdict", "ratio", "95 % interval", "n"),
        (
            f"baseline: step {format_ms(ablation.baseline.whole_step_ms)}, "
            f"with free data {ceiling} at most",
            "",
            "1.00x",
            "",
            "",
        ),
    ]
    for row in ablation.rows:
        pair = cells(row.comparison) if row.comparison else ("", "", "")
        table.append((row.choice.label, row.verdict.value, *pair))
    return table
