"""Write one measured claim into a folder that someone else can judge and repeat."""

import io
import os
import re
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import flatout
from benchmarks.bench import Record, calibration
from benchmarks.programs import ran
from flatout.records.machine import Machine
from flatout.reporting.documents import write_json, write_text
from flatout.tuning.trial_runner import JOURNAL
from flatout.workflow.recipe_files import write_recipe

EVIDENCE = {
    "journals.tar.gz": JOURNAL,
    "guard.tar.gz": "guard.json",
    "requests.tar.gz": "requests-*.json",
}
"""What is kept of a run beyond its record: archives, and the names of the files in them."""
SCHEMA = "flatout.benchmark/1"
RECORDS = Path(__file__).parent / "records"
PREDICTIONS = "What was predicted of each technique that was tried alone, and what it gave:"
FACTS = (
    *("python", "huge_pages", "swap_used_bytes", "variables"),
    *("torch_cuda", "torch_hip", "driver", "driver_cuda", "gpus"),
)
"""What the environment record takes over from the machine's facts. No names of hosts or folders."""


def write_record(record: Record, machine: Machine, *, date: str, log: str, root: Path) -> Path:
    """Write the record's folder and return it; one of the same day and theme is replaced."""
    folder = root / f"{date}_{record.theme}_{device_tag(machine)}"
    result = {
        "schema": SCHEMA,
        "theme": record.theme,
        "date": date,
        "device": device_words(machine),
        "claim": record.claim,
        "holds": record.holds,
        "finding": record.finding,
        "repeat": _repeat(record),
        "table": [list(row) for row in record.table],
        "notes": list(record.notes),
        "calibration": [list(row) for row in _calibration(record)],
        "raw": record.raw,
    }
    hidden = {str(Path.home()): "~", str(Path(__file__).parent.parent): "."}
    write_json(scrubbed(result, hidden), folder / "result.json")
    write_json(environment(machine), folder / "env.json")
    write_text(scrubbed(page(record, machine, date), hidden), folder / "README.md")
    write_text(scrubbed(log, hidden), folder / "log.txt")
    if record.recipe is not None:
        clean = replace(record.recipe, about=scrubbed(record.recipe.about, hidden))
        write_recipe(clean, folder / "recipe.toml")
    return folder


def out_folder() -> Path:
    """Return where the records go: to `$OUT` when that is set."""
    return Path(os.environ.get("OUT") or RECORDS)


def write_evidence(work: Path, folder: Path) -> None:
    """Keep what says most below a folder of work: each trial as it was, what the guard compared.

    All in few files: of a machine that was lent few come back. What there is none of has no file.
    """
    hidden = {str(work): "work", str(Path.home()): "~", str(Path(__file__).parent.parent): "."}
    for archive, name in EVIDENCE.items():
        part = folder / f"{archive}.part"
        found = sorted(work.rglob(name))
        if not found:
            continue
        with tarfile.open(part, "w:gz") as file:
            for path in found:
                data = path.read_bytes()
                if name == JOURNAL:  # what the guard compared is numbers, not text
                    data = scrubbed(data.decode("utf-8"), hidden).encode()
                entry = tarfile.TarInfo("-".join(path.relative_to(work).parts))
                entry.size = len(data)
                file.addfile(entry, io.BytesIO(data))
        part.replace(folder / archive)


def page(record: Record, machine: Machine, date: str) -> str:
    """Return the record's page: claim, verdict, the table, how to repeat."""
    predictions = _calibration(record)
    verdict = "holds" if record.holds else "does not hold"
    notes = [f"- {note}" for note in record.notes]
    return "\n".join(
        [
            f"# {record.theme}, {date}",
            "",
            f"Claim: {record.claim}. **It {verdict}.**",
            "",
            *markdown_table(record.table),
            "",
            f"Measured on {device_words(machine)} with torch {machine.torch_version}, "
            f"flatout {flatout.__version__}; details in `env.json`, every repeat in `result.json`.",
            *(["", *notes] if notes else []),
            *(["", PREDICTIONS, "", *markdown_table(predictions)] if predictions else []),
            "",
            "To repeat it:",
            "",
            "```sh",
            _repeat(record),
            "```",
            "",
        ]
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines; the first row is the header, all columns but the first are numbers.

    >>> markdown_table([("", "n"), ("a", "3")])
    ['|  | n |', '|---|--:|', '| a | 3 |']
    """
    header, *body = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|---|" + "--:|" * (len(rows[0]) - 1)
    return [header, rule, *body]


def device_tag(machine: Machine) -> str:
    """Return `<n>x<device>` for a folder's name.

    >>> from flatout.records.machine import Device
    >>> cpu = Device(kind="cpu", name="AMD EPYC (Turin)", memory_bytes=0)
    >>> device_tag(Machine(device=cpu, logical_cores=8, usable_cores=2, physical_cores=2,
    ...     memory_bytes=0, shm_free_bytes=0))
    '2xamd-epyc-turin'
    """
    slug = re.sub(r"[^a-z0-9]+", "-", machine.device.name.lower()).strip("-")
    return f"{_count(machine)}x{slug or machine.device.kind}"


def device_words(machine: Machine) -> str:
    """Return what it was measured on, for people."""
    what = "cores of " if machine.device.kind == "cpu" else ""
    return f"{_count(machine)} {what}{machine.device.name}"


def environment(machine: Machine) -> dict[str, Any]:
    """Return the stack that was measured."""
    return {
        "flatout": flatout.__version__,
        "commit": _commit(),
        "torch": machine.torch_version,
        "device": machine.device.name,
        "cpu": machine.cpu_name,
        "cpu_features": sorted(machine.cpu_features),
        "usable_cores": machine.usable_cores,
        "memory_bytes": machine.memory_bytes,
        "tcmalloc": machine.tcmalloc_path is not None,
        **{name: machine.facts[name] for name in FACTS if name in machine.facts},
    }


def scrubbed(value: Any, hidden: Mapping[str, str]) -> Any:
    """Return the value with folders of this machine replaced, in all its texts.

    >>> scrubbed({"a": ["/home/ann/x.py", 3]}, {"/home/ann": "~"})
    {'a': ['~/x.py', 3]}
    """
    if isinstance(value, Mapping):
        return {scrubbed(key, hidden): scrubbed(item, hidden) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(item, hidden) for item in value]
    if not isinstance(value, str):
        return value
    for folder in sorted(hidden, key=len, reverse=True):
        value = value.replace(folder, hidden[folder])
    return value


def _calibration(record: Record) -> Sequence[Sequence[str]]:
    """Return what was predicted alongside what was measured, from the suite or from its tunings."""
    return record.calibration or calibration(record.ablations)


def _repeat(record: Record) -> str:
    return record.repeat or f"python -m benchmarks.run {record.theme}"


def _count(machine: Machine) -> int:
    return len(machine.devices) or machine.usable_cores


def _commit() -> str:
    """Return the commit that was measured, marked when files differ from it.

    A copy of the tree without its history is told by COMMIT in the environment.
    """
    if named := os.environ.get("COMMIT"):
        return named
    root = Path(__file__).parent
    try:
        done = ran(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=root, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
