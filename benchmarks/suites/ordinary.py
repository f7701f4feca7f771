"""Ordinary scripts, each with one known cause, tuned from the command line as a newcomer does.

    python -m benchmarks.run ordinary --only photo_folder,tiny_model

Each script leaves its part of the record, as in the suite `search`: a later run adds the others.
"""

import datetime
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Record, TrialFailedError
from benchmarks.programs import python
from flatout.records.ablation import Ablation, ablation_from_json
from flatout.records.catalogue import technique_class
from flatout.records.units import format_interval, format_ratio

THEME = "ordinary"
SCRIPTS = Path(__file__).parents[2] / "tests" / "scripts" / "ordinary"
MOST_LINES = 25
SMOKE_S = 30.0
BUDGET_S = 300.0
LIMIT_S = 900.0
MADE = ("flatout-out", "photos")
"""What may lie in the folder afterwards; one script makes its photographs itself."""
COMPUTING = ("compute", "precision", "compile", "optimizer", "memory")
CAUSES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "photo_folder": ("photographs are decoded in the loop", ("data",)),
    "slow_collate": ("a collate function in plain Python", ("data",)),
    "network_disk": ("each sample waits for a disk", ("data",)),
    "padded_reviews": ("most of a batch is padding", ("data", *COMPUTING)),
    "bert_trainer": ("computing in fp32, attention written out", COMPUTING),
    "lightning_cnn": ("computing in fp32", COMPUTING),
    "char_gpt": ("computing in fp32", COMPUTING),
    "large_vocabulary": ("computing in fp32, most of it the output layer", COMPUTING),
    "tiny_model": ("84 small tensors in an optimizer's loop", ("optimizer", "compile", "compute")),
    "big_embedding": ("Adam over all rows of large tables", ("optimizer", "compile", "compute")),
    "careless_evaluation": ("evaluation with gradients", ()),
    "chatty_metrics": ("the script's own loop over numbers", ()),
}
"""By script what a person who knows it would say, and the families of techniques that act on that;
none where the script itself has to be changed."""


def run(bench: Bench) -> Record:
    """Tune the chosen scripts, and make the record of all that were tuned on this device."""
    names, parts = bench.chosen([*CAUSES], "script")
    for name in names:
        bench.say(f"{name}: tune")
        part = tuned(name, bench)
        bench.say(f"  {part['stdout'].partition(chr(10))[0]}")
        (parts / f"{name}.json").write_text(json.dumps(part), encoding="utf-8")
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(parts.glob("*.json"))]
    return record_of([part for part in found if part["device"] == bench.machine.device.name])


def tuned(name: str, bench: Bench) -> dict[str, Any]:
    """Return what the command printed and wrote for one script."""
    work = bench.work / name
    work.mkdir()
    shutil.copy(SCRIPTS / f"{name}.py", work)
    is_smoke = bench.budget_s < SMOKE_S
    budget = f"{min(bench.budget_s, BUDGET_S):.0f}s"
    words = ["--budget", budget, *(["--accept-load"] if is_smoke else [])]
    began = time.monotonic()
    done = python(["-m", "flatout", "tune", *words, f"{name}.py"], cwd=work, timeout=LIMIT_S)
    result = work / "flatout-out" / "ablation.json"
    if done.returncode or not result.exists():
        raise TrialFailedError(f"{name}: exit code {done.returncode}: {done.stderr[-1_000:]}")
    return {
        "name": name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": bench.machine.device.name,
        "budget": budget,
        "took_s": time.monotonic() - began,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "ablation": json.loads(result.read_text(encoding="utf-8")),
        "left": sorted(path.name for path in work.iterdir()),
    }


def troubles(part: Mapping[str, Any], ablation: Ablation) -> list[str]:
    """Return what is wrong with a report, next to the known cause and to its own numbers."""
    lines = part["stdout"].splitlines()
    answer = " ".join(part["stdout"].partition("\n\n")[0].split())
    pair, families = ablation.confirmation, CAUSES[part["name"]][1]
    found = []
    if len(lines) > MOST_LINES:
        found.append(f"{len(lines)} lines")
    if pair is not None and format_ratio(pair.ratio) not in answer:
        found.append("the first line has another ratio than the result")
    if families and not ablation.recipe.choices:
        found.append(f"nothing kept, {ablation.stopped}")
    elif families and not families_of(ablation) & {*families}:
        found.append("what was kept does not act on the cause")
    if not lines or not lines[-1].startswith("files "):
        found.append("the last line does not name the files")
    if {*part["left"]} - {*MADE, f"{part['name']}.py"}:
        found.append("files of its trials are left")
    return found


def families_of(ablation: Ablation) -> set[str]:
    """Return the families of the techniques that were kept."""
    kinds = (technique_class(choice.technique) for choice in ablation.recipe.choices)
    return {kind.__module__.split(".")[2] for kind in kinds}


def record_of(parts: Sequence[Mapping[str, Any]]) -> Record:
    """Return the record of all parts."""
    ablations = [ablation_from_json(part["ablation"]) for part in parts]
    wrong = [troubles(part, x) for part, x in zip(parts, ablations, strict=True)]
    faster = sum(x.confirmation is not None and x.confirmation.interval[0] > 1 for x in ablations)
    table: list[tuple[str, ...]] = [
        ("script", "known cause", "budget", "flatout", "95 % interval", "n", "kept", "wrong")
    ]
    for part, ablation, said in zip(parts, ablations, wrong, strict=True):
        pair = ablation.confirmation
        shown = ("nothing kept", "", "")
        if pair is not None:
            shown = format_ratio(pair.ratio), format_interval(*pair.interval), str(pair.n)
        kept, cause = ", ".join(ablation.recipe.names), CAUSES[part["name"]][0]
        table.append((part["name"], cause, part["budget"], *shown, kept, "; ".join(said)))
    return Record(
        theme=THEME,
        claim=(
            f"of {len(CAUSES)} ordinary scripts each report has at most {MOST_LINES} lines, its "
            "first line has the proven ratio, and what is kept acts on the known cause"
        ),
        holds=len(parts) == len(CAUSES) and not any(wrong),
        finding=f"{sum(not x for x in wrong)} of {len(parts)} as they should be; {faster} faster",
        table=table,
        raw={"parts": list(parts), "python": sys.version},
        notes=("The reports as they were printed are in `result.json`.",),
        ablations=ablations,
    )
