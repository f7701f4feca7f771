"""What a tuning leaves for the next one on this machine, and what that makes of it."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from flatout.cli.techniques import command
from flatout.records.recipe import Choice
from flatout.records.technique import EarlierResult, prior_of, priors
from flatout.tuning.history import append_results, errors_on, history_path, read_history
from flatout.tuning.ranking import Experience, rank
from tests.tuning.test_ranking import candidate
from tests.workflow.test_tune import MACHINE, World, profile, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

BOTH = ("bf16_autocast", "fused_optimizer")


def test_a_tuning_writes_down_what_it_found_of_each_technique(tmp_path):
    history = tmp_path / "history.jsonl"

    run(World({"bf16_autocast": 0.5}), tmp_path / "out", only=BOTH, history=history)

    found = {one.technique: one for one in read_history(history)}
    assert set(found) == set(BOTH)
    assert found["bf16_autocast"].verdict == "kept"
    assert found["bf16_autocast"].ratio == pytest.approx(2.0, rel=0.1)
    assert found["bf16_autocast"].script == "train"


def test_a_tuning_that_goes_on_writes_down_only_what_is_new(tmp_path):
    history = tmp_path / "history.jsonl"
    about = {"only": BOTH, "history": history}
    run(World({"bf16_autocast": 0.5}, interrupt_after=8), tmp_path / "out", **about)
    before = read_history(history)

    run(World({"bf16_autocast": 0.5}), tmp_path / "out", resume=True, **about)

    found = [(one.technique, one.ratio, one.n) for one in read_history(history)]
    assert before
    assert len(found) == len({*found}) > len(before)


def test_a_history_on_a_full_disk_lacks_a_tuning_which_ends_well_all_the_same(tmp_path):
    found = run(World({"bf16_autocast": 0.5}), tmp_path / "out", only=BOTH[:1])

    append_results(Path("/dev/full"), found, "train", "cpu")


def test_the_next_tuning_tries_first_what_helped_here(tmp_path):
    history = tmp_path / "history.jsonl"
    line = {"at": "", "script": "other", "device": "test cpu", "interval": [1.0, 1.9], "n": 3}
    results = [
        line | {"technique": "bf16_autocast", "predicted": 1.3, "ratio": 0.5, "verdict": "worse"},
        line | {"technique": "fused_optimizer", "predicted": 1.05, "ratio": 2.0, "verdict": "kept"},
    ]
    history.write_text("".join(json.dumps(one) + "\n" for one in 5 * results))
    before, after = World({}), World({})

    run(before, tmp_path / "before", only=BOTH, budget_s=1e4)
    run(after, tmp_path / "after", only=BOTH, budget_s=1e4, history=history)

    first = [next(x for x in world.asked if x != "baseline") for world in (before, after)]
    assert first == ["bf16_autocast", "fused_optimizer"]


def test_results_of_another_device_order_nothing(tmp_path):
    history = tmp_path / "history.jsonl"
    line = {"at": "", "script": "a", "device": "another", "interval": [1.0, 9.0], "n": 3}
    line |= {"technique": "fused_optimizer", "predicted": 1.05, "ratio": 9.0, "verdict": "kept"}
    history.write_text(json.dumps(line) + "\n")
    world = World({})

    run(world, tmp_path / "out", only=BOTH, history=history)

    assert next(x for x in world.asked if x != "baseline") == "bf16_autocast"


def test_a_resumed_tuning_orders_by_what_was_known_when_it_began(tmp_path):
    history, out = tmp_path / "history.jsonl", tmp_path / "out"
    first = World({"bf16_autocast": 0.5})
    run(first, out, only=BOTH, history=history)
    again = World({"bf16_autocast": 0.5})

    run(again, out, only=BOTH, history=history, resume=True)

    assert again.asked == []


def test_a_damaged_line_is_left_out(tmp_path):
    history = tmp_path / "history.jsonl"
    run(World({}), tmp_path / "out", only=BOTH, history=history)
    whole = len(read_history(history))
    history.write_text('{"at": 1}\nnonsense\n' + history.read_text() + '{"at": "20')

    assert len(read_history(history)) == whole > 0


def test_the_history_is_shown_and_deleted_by_one_command(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run(World({"bf16_autocast": 0.5}), tmp_path / "out", only=BOTH, history=history_path())

    shown = CliRunner().invoke(command, ["--history"])
    gone = CliRunner().invoke(command, ["--forget-history"])
    empty = CliRunner().invoke(command, ["--history"])

    assert "bf16_autocast" in shown.output
    assert "kept" in shown.output
    assert gone.output.startswith("deleted ")
    assert "No tuning on this machine" in empty.output


def test_an_uncertain_prediction_of_no_gain_comes_before_a_sure_one():
    sure, unsure = candidate(1.0), candidate(1.0)
    object.__setattr__(unsure, "deviation", math.log(1.2))
    object.__setattr__(unsure, "bound", candidate(2.0).bound)

    assert unsure.hope > sure.hope == 0.0


def test_every_prior_says_where_it_comes_from_and_is_of_a_technique():
    from flatout.records import catalogue

    assert set(priors()) <= set(catalogue.names())
    assert all(prior.source and prior.spread > 1 for x in priors().values() for prior in x.values())


def test_the_prior_of_a_more_special_case_counts():
    assert prior_of("torch_compile", "cpu_lowered").speedup == 1.0
    assert prior_of("torch_compile", "cpu").speedup == prior_of("torch_compile", "cuda").speedup
    assert prior_of("bf16_autocast", "cpu_lowered") == prior_of("bf16_autocast", "cpu")


def test_what_is_learned_changes_the_order_and_not_the_prediction(tmp_path):
    from flatout.records.technique import Numerics
    from flatout.tuning.ranking import Search

    search = Search(machine=MACHINE, ceiling=Numerics.PRECISION, only=BOTH)
    plain = rank(profile(100.0), search)
    known = rank(profile(100.0), search, Experience(errors={"bf16_autocast": [-0.7] * 4}))

    assert {x.choice.technique: x.ratio for x in plain} == {
        x.choice.technique: x.ratio for x in known
    }
    assert [x.choice for x in plain] == [x.choice for x in known][::-1]
    assert known[0].choice == Choice(technique="fused_optimizer")


def test_a_result_of_one_pair_is_kept_though_its_interval_is_open(tmp_path):
    history = tmp_path / "history.jsonl"

    run(World({"bf16_autocast": 1.9}), tmp_path / "out", only=BOTH[:1], history=history)

    (one,) = read_history(history)
    assert (one.n, one.verdict) == (1, "no_effect")


@pytest.mark.parametrize(
    ("interval", "n", "counts"), [((1.1, 1.4), 3, 1), ((0.4, 7.0), 3, 0), ((1.1, 1.4), 1, 0)]
)
def test_what_noise_left_open_corrects_no_prediction(interval, n, counts):
    known = {"at": "", "script": "a", "device": "CPU", "technique": "x", "verdict": "inconclusive"}
    one = EarlierResult(predicted=1.0, ratio=1.25, interval=interval, n=n, **known)

    assert len(errors_on("CPU", [one]).get("x", [])) == counts
