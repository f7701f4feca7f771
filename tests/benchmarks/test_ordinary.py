"""The suite `ordinary`: what its record says of reports."""

from pathlib import Path

import pytest

from benchmarks.suites import ordinary
from flatout.records import catalogue
from flatout.records.errors import UserError
from flatout.records.recipe import Choice
from tests.benchmarks.made_up import BF16, a_machine, an_ablation

ANSWER = "2.00x faster (95% interval 1.90-2.10, n=6 pairs): 1 of 3\ntechniques kept\n\n"
FILES = "files flatout-out/: report.md"


def a_part(name="char_gpt", kept=BF16, **changes):
    return {
        "name": name,
        "device": "AMD EPYC",
        "budget": "300s",
        "stdout": f"{ANSWER}baseline\n\n{FILES}\n",
        "ablation": an_ablation(*([kept] if kept else [])).to_json(),
        "left": ["flatout-out", f"{name}.py"],
        **changes,
    }


ACTING = {
    "data": Choice(technique="loader_workers"),
    "optimizer": Choice(technique="fused_optimizer"),
    "compute": BF16,
}


def all_parts(**changes):
    kept = {name: ACTING.get(next(iter(acts), "")) for name, (_, acts) in ordinary.CAUSES.items()}
    parts = [a_part(name, choice) for name, choice in kept.items() if name != "char_gpt"]
    return [*parts, a_part(**changes)]


def test_every_script_is_there_and_its_families_are_those_of_techniques():
    families = {catalogue.technique_class(x).__module__.split(".")[2] for x in catalogue.names()}

    assert {path.stem for path in ordinary.SCRIPTS.glob("*.py")} == {*ordinary.CAUSES}
    assert {family for _, acts in ordinary.CAUSES.values() for family in acts} <= families


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"kept": None, "stdout": f"Nothing\n\n{FILES}\n"}, "nothing kept, finished"),
        ({"stdout": ANSWER + 30 * "a line\n" + FILES}, "34 lines"),
        ({"stdout": f"3.00x faster\n\n{FILES}"}, "the first line has another ratio"),
        ({"stdout": f"4 found, 2.00x\n\nin the second part\n{FILES}"}, ""),
        ({"stdout": "2.00x\n\nnext  flatout run\n"}, "the last line does not name the files"),
        ({"kept": Choice(technique="loader_workers")}, "does not act on the cause"),
        ({"left": ["checkpoint.pt", "flatout-out", "char_gpt.py"]}, "files of its trials are left"),
    ],
)
def test_a_report_that_is_wrong_is_named(changes, said):
    record = ordinary.record_of(all_parts(**changes))

    row = next(row for row in record.table if row[0] == "char_gpt")
    assert said in row[-1]
    assert bool(row[-1]) is bool(said)
    assert record.holds is not bool(said)


def test_some_of_the_scripts_are_no_proof_of_all():
    assert ordinary.record_of(all_parts()).holds
    assert not ordinary.record_of(all_parts()[3:]).holds


def test_a_later_run_adds_to_the_parts_of_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr(ordinary, "tuned", lambda name, _bench: a_part(name, None))
    made = {"machine": a_machine(), "work": tmp_path, "parts": tmp_path / "parts"}

    ordinary.run(ordinary.Bench(**made, only=("char_gpt",)))
    record = ordinary.run(ordinary.Bench(**made, only=("tiny_model",)))

    assert [row[0] for row in record.table[1:]] == ["char_gpt", "tiny_model"]


def test_a_script_that_is_not_there_is_refused(tmp_path):
    bench = ordinary.Bench(machine=a_machine(), work=tmp_path, only=("gpt",))

    with pytest.raises(UserError, match="no script gpt; there are photo_folder"):
        ordinary.run(bench)


@pytest.mark.slow
def test_a_script_is_tuned_as_a_newcomer_does(tmp_path):
    bench = ordinary.Bench(
        machine=a_machine(),
        work=tmp_path,
        parts=tmp_path / "p",
        budget_s=20.0,
        only=("tiny_model",),
    )

    record = ordinary.run(bench)

    (part,) = record.raw["parts"]
    assert part["took_s"] > 1
    assert Path(part["stdout"].split("files ")[1].split(":")[0]) == Path("flatout-out")
    assert record.table[1][0] == "tiny_model"
