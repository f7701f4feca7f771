"""The suite `search`: its list of recipes by hand, and what its record says of parts."""

from pathlib import Path

import pytest
import tomllib

from benchmarks.suites import search
from flatout.records import catalogue
from flatout.records.ablation import Comparison
from flatout.records.errors import UserError
from flatout.records.recipe import Choice, Recipe
from tests.benchmarks.made_up import BF16, a_machine, an_ablation


def a_part(name="gpt", ratio=0.98, aa="no_effect", effects=()):
    pair = {"ratio": ratio, "interval": [0.95, 1.01], "n": 4}
    return {
        "name": name,
        "device": "AMD EPYC",
        "ablation": an_ablation(BF16).to_json(),
        "best": "by hand 1: bf16_autocast",
        "against_best": pair,
        "against_baseline": pair | {"ratio": 2.0},
        "effects": list(effects),
        "aa": aa,
    }


def an_effect(screen, pairs):
    return {"technique": "x", "screen": {"ratio": screen}, "pairs": {"ratio": pairs}}


def all_parts(**changes):
    effects = [an_effect(1.2, 1.21)]
    return [a_part(name, **{"effects": effects} | changes) for name in search.WORKLOADS]


def test_every_workload_has_a_script_and_recipes_of_techniques_that_exist(tmp_path):
    listed = tomllib.loads(search.BY_HAND.read_text(encoding="utf-8"))

    assert listed.keys() == {*search.WORKLOADS}
    for recipes in listed.values():
        for labels in recipes:
            catalogue.build(Recipe(choices=tuple(map(Choice.from_label, labels))))
    for name in search.WORKLOADS:
        if name != "cnn_files":
            target = search.workload_of(name, tmp_path, is_smoke=True).target
            compile(Path(target).read_text(encoding="utf-8"), target, "exec")


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"ratio": 0.96}, False),
        ({"aa": "kept"}, False),
        ({"effects": [an_effect(1.2, 1.3)]}, False),
        ({"effects": [an_effect(1.1, 0.9)]}, False),
        ({"effects": []}, False),
    ],
)
def test_the_claim_needs_every_part_of_it(changes, holds):
    assert search.record_of(all_parts(**changes)).holds is holds


def test_some_of_the_workloads_are_no_proof_of_all():
    record = search.record_of(all_parts()[:3])

    assert not record.holds
    assert record.finding.startswith("3 of 12 workloads: 98 % of the best in the middle")


def test_one_workload_that_is_far_off_refutes_the_claim():
    parts = all_parts()
    parts[0] = a_part(parts[0]["name"], ratio=0.9, effects=[an_effect(1.2, 1.2)])

    assert not search.record_of(parts).holds


def test_a_later_run_adds_to_the_parts_of_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "measured", lambda name, _bench: a_part(name))
    made = {"machine": a_machine(), "work": tmp_path, "parts": tmp_path / "parts"}

    search.run(search.Bench(**made, only=("gpt",)))
    record = search.run(search.Bench(**made, only=("gan",)))

    assert [row[0] for row in record.table[1:]] == ["gan", "gpt"]


def test_a_workload_that_is_not_there_is_refused(tmp_path):
    bench = search.Bench(machine=a_machine(), work=tmp_path, only=("gtp",))

    with pytest.raises(UserError, match="no workload gtp; there are cnn_files"):
        search.run(bench)


def recipe_of(*labels):
    return Recipe(choices=tuple(map(Choice.from_label, labels)))


OTHERS = {
    "unchanged": recipe_of(),
    "by hand 1": recipe_of("bf16_autocast"),
    "by hand 2": recipe_of("channels_last"),
}


def raced(monkeypatch, own, ratios):
    """Race a recipe against others, by how much faster it is than each; return the pairs asked."""
    asked = []

    def ratio(_lab, base, _candidate, pairs):
        asked.append((base.label, pairs))
        value = ratios[base.label]
        return Comparison(ratio=value, interval=(value, value), n=pairs)

    monkeypatch.setattr(search, "ratio", ratio)
    return *search.race(None, own, OTHERS, 4), asked


def test_the_best_by_hand_is_found_in_single_pairs_and_raced_in_fresh_ones(monkeypatch):
    ratios = {"baseline": 1.9, "bf16_autocast": 1.01, "channels_last": 1.4}

    best, pair, asked = raced(monkeypatch, recipe_of("bf16_autocast", "channels_last"), ratios)

    assert (best, pair["ratio"], pair["n"]) == ("by hand 1", 1.01, 4)
    assert [pairs for _, pairs in asked] == [1, 1, 1, 4]
    assert asked[-1][0] == "bf16_autocast"


@pytest.mark.parametrize(("other", "best"), [(1.3, "by hand 1"), (0.8, "by hand 2")])
def test_the_same_recipe_is_raced_only_against_one_that_looks_better(monkeypatch, other, best):
    ratios = {"baseline": 1.9, "channels_last": other}

    found, pair, _ = raced(monkeypatch, recipe_of("bf16_autocast"), ratios)

    assert found == best
    assert (pair is None) == (other > 1)
