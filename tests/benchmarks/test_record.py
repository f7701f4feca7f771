"""A record's folder: all that is needed to judge it, nothing about whose machine it was."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import tomllib

from benchmarks.record import environment, page, scrubbed, write_evidence, write_record
from flatout.records.recipe import Recipe
from tests.benchmarks.made_up import BF16, a_machine, a_record, an_ablation
from tests.paths import ROOT


def write(root, record, machine=None):
    machine = machine or a_machine()
    return write_record(record, machine, date="2026-01-02", log="said\n", root=root)


def test_the_folder_is_named_by_date_theme_and_device(tmp_path):
    gpu = a_machine(kind="cuda", name="NVIDIA H200")

    assert write(tmp_path, a_record()).name == "2026-01-02_speed_2xamd-epyc"
    assert write(tmp_path, a_record(), gpu).name == "2026-01-02_speed_1xnvidia-h200"


def test_the_folder_holds_claim_repeats_stack_recipe_and_log(tmp_path):
    folder = write(tmp_path, a_record(recipe=Recipe(choices=(BF16,))))

    assert {path.name for path in folder.iterdir()} == {
        *("README.md", "result.json", "env.json", "recipe.toml", "log.txt")
    }
    result = json.loads((folder / "result.json").read_text())
    assert result["raw"]["times_s"] == [0.002, 0.0021]
    assert (result["schema"], result["holds"]) == ("flatout.benchmark/1", True)
    recipe = tomllib.loads((folder / "recipe.toml").read_text())
    assert recipe["technique"][0]["name"] == "bf16_autocast"


def test_the_same_day_s_record_is_replaced(tmp_path):
    write(tmp_path, a_record(finding="old"))

    folder = write(tmp_path, a_record(finding="new"))

    assert json.loads((folder / "result.json").read_text())["finding"] == "new"
    assert len(list(tmp_path.iterdir())) == 1


def test_home_and_clone_do_not_show(tmp_path):
    inside = ROOT / "scenarios/x.py"
    raw = {"error": f"in {Path.home()}/job.py", "target": str(inside)}

    folder = write(tmp_path, a_record(raw=raw, notes=[f"see {Path.home()}/job.py"]))

    text = "".join(path.read_text() for path in folder.iterdir())
    assert f"{Path.home()}/" not in text
    assert json.loads((folder / "result.json").read_text())["raw"] == {
        "error": "in ~/job.py",
        "target": "./scenarios/x.py",
    }


def test_the_longest_hidden_folder_is_replaced_first():
    assert scrubbed("/a/b/c", {"/a": "~", "/a/b": "."}) == "./c"


def test_the_stack_names_no_host_and_no_folder():
    stack = environment(a_machine())

    assert stack["torch"] == "2.13.0"
    assert stack["cpu_features"] == ["avx512_bf16"]
    assert set(stack) & {"system", "compiler", "facts"} == set()


@pytest.mark.parametrize(("holds", "words"), [(True, "It holds"), (False, "It does not hold")])
def test_the_page_says_whether_the_claim_holds(holds, words):
    text = page(a_record(holds=holds), a_machine(), "2026-01-02")

    assert words in text
    assert "| baseline | 2.00 ms |" in text
    assert "python -m benchmarks.run speed" in text


def test_predictions_stand_beside_what_was_measured():
    row = replace(an_ablation(BF16).rows[0], predicted_ratio=1.6)
    record = a_record(ablations=[replace(an_ablation(BF16), rows=(row,))])

    text = page(record, a_machine(), "2026-01-02")

    assert "| bf16_autocast | 1.60x |  | 2.00x | 1.25 |" in text


def test_a_record_without_a_tuning_has_no_predictions():
    assert "predicted" not in page(a_record(), a_machine(), "2026-01-02")


def test_what_says_most_below_a_folder_is_kept_in_few_archives(tmp_path):
    work, folder = tmp_path / "work", tmp_path / "record"
    (work / "a").mkdir(parents=True)
    folder.mkdir()
    (work / "a" / "journal.jsonl").write_text(f"{work}/train.py")
    (work / "a" / "guard.json").write_bytes(b"\xe5\x00\xff")
    (work / "requests-gpt-4.json").write_text("[]")

    write_evidence(work, folder)

    kept = {}
    for path in folder.glob("*.tar.gz"):
        with tarfile.open(path) as archive:
            kept |= {name: archive.extractfile(name).read() for name in archive.getnames()}
    assert kept == {
        "a-journal.jsonl": b"work/train.py",
        "a-guard.json": b"\xe5\x00\xff",
        "requests-gpt-4.json": b"[]",
    }
