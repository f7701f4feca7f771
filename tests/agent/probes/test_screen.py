"""Screens of real small trainings: what is switched when, and what becomes of what fails."""

import json
import statistics
from types import SimpleNamespace

import pytest
import torch

from flatout.agent.probes.screen import OpenBlock, Screening
from flatout.agent.session import Session
from flatout.analysis.screen import ScreenBlock
from flatout.records.json_records import from_plain
from flatout.records.trial import Outcome
from flatout.records.trial_spec import TrialSpec
from tests.support.probed import SCRIPTS, probed

SCRIPT = SCRIPTS / "switched.py"
ENDLESS = 10**9
pytestmark = pytest.mark.slow


def choice(technique, group="", **settings):
    label = " ".join([technique, *(f"{k}={v}" for k, v in settings.items())])
    return {
        "label": label,
        "technique": technique,
        "settings": settings,
        "group": group or technique,
        "partners": [],
    }


FUSED, FOREACH = (choice(name, "optimizer") for name in ("fused_optimizer", "foreach_optimizer"))
COLLECT = choice("scheduled_gc")


def screened(kind, *choices, steps=100_000, max_s=6.0, script=SCRIPT):
    trial = probed(
        script,
        kind,
        str(steps),
        probes={"screen": {"choices": list(choices), "max_s": max_s, "seed": 0}},
        steps=ENDLESS,
    )
    seen = trial.details["probes"].get("screen") or {}
    return trial, seen, [from_plain(ScreenBlock, block) for block in seen.get("blocks", ())]


@pytest.mark.smoke
def test_a_screen_visits_each_technique_alone_and_then_both_together():
    trial, seen, blocks = screened("plain", FUSED, COLLECT)

    assert trial.outcome is Outcome.OK
    assert not trial.details["errors"]
    assert [block.on for block in blocks[:3]] == [(), ("fused_optimizer",), ("scheduled_gc",)]
    assert {"fused_optimizer", "scheduled_gc"} in [{*block.on} for block in blocks]
    assert {block.steps for block in blocks} == {seen["block_steps"]}
    assert seen["startup_s"].keys() == {"fused_optimizer", "scheduled_gc"}
    assert seen["failed"] == seen["refused"] == {}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_technique_on_the_data_is_switched_where_the_samples_are_made(workers):
    """What a store saves is seen block by block, also where forked workers draw from it."""
    kept = choice("ram_cache")

    trial, seen, blocks = screened(
        str(workers), kept, COLLECT, script=SCRIPTS / "switched_data.py", max_s=10.0
    )

    assert trial.outcome is Outcome.OK
    assert not trial.details["errors"]
    assert seen["failed"] == seen["refused"] == {}
    steps_s = {
        is_on: [block.step_s for block in blocks if ("ram_cache" in block.on) is is_on]
        for is_on in (False, True)
    }
    assert min(map(len, steps_s.values())) >= 2
    # Four samples of 20 ms against none: far apart, however busy the machine.
    assert statistics.median(steps_s[True]) < 0.5 * statistics.median(steps_s[False])


def test_what_refuses_the_data_is_refused_by_the_screen_with_its_reason():
    _, seen, _ = screened(
        "0", choice("fast_resize"), COLLECT, FUSED, script=SCRIPTS / "switched_data.py"
    )

    assert "resizes no colour image" in seen["refused"]["fast_resize"]


def test_of_two_implementations_of_the_optimizer_one_is_on_at_a_time():
    _, seen, blocks = screened("plain", FUSED, FOREACH)

    assert seen["failed"] == {}
    assert {frozenset(block.on) for block in blocks} <= {
        frozenset(),
        frozenset({"fused_optimizer"}),
        frozenset({"foreach_optimizer"}),
    }


def test_a_step_of_two_optimizers_is_whole_before_anything_is_switched():
    trial, seen, blocks = screened("gan", FUSED, COLLECT)

    assert not trial.details["errors"]
    assert len(blocks) > 3
    # Two critic steps of four samples belong to each step, and one of the model.
    assert {block.samples for block in blocks} == {8.0}
    assert seen["failed"] == {}


def test_accumulated_gradients_make_one_step():
    trial, seen, blocks = screened("accumulating", FUSED, COLLECT)

    assert not trial.details["errors"]
    assert len(blocks) > 3
    assert seen["failed"] == {}


def test_steps_with_an_evaluation_are_left_out_of_their_block():
    _, seen, blocks = screened("evaluating", FUSED, COLLECT)

    assert {block.steps for block in blocks} <= {*range(1, seen["block_steps"] + 1)}
    # An evaluation takes 50 ms where a step takes 3: in none of the blocks it is the middle step.
    assert max(block.step_s for block in blocks if not block.left_out) < 0.05


def test_a_technique_that_ruins_the_loss_is_named_and_ends_the_process():
    _, seen, _ = screened("ruined", FUSED, COLLECT)

    assert seen["failed"] == {"fused_optimizer": "the loss was not finite"}
    assert seen["ended_early"] is True


def test_a_script_that_breaks_leaves_a_log_of_what_was_on(tmp_path):
    trial = probed(
        SCRIPT,
        "breaks",
        "100000",
        probes={"screen": {"choices": [FUSED, COLLECT], "max_s": 6.0, "seed": 0}},
        steps=ENDLESS,
        keep=tmp_path,
        keep_names=("screen-*.jsonl",),
    )

    (log,) = tmp_path.glob("screen-*.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert trial.outcome is Outcome.CRASH
    assert rows[-1] == {"on": ["fused_optimizer"]}
    assert rows[1]["block"]["on"] == []


def test_a_script_of_too_few_steps_ends_before_its_screen():
    trial, seen, blocks = screened("plain", FUSED, COLLECT, steps=30)

    assert trial.outcome is Outcome.OK
    assert seen["stage"] != "over"
    assert len(blocks) <= 1


def test_what_has_nothing_to_act_on_is_refused_with_its_reason():
    _, seen, blocks = screened("plain", FUSED, COLLECT, choice("channels_last"))

    assert "no 2-d convolutions" in seen["refused"]["channels_last"]
    assert not any("channels_last" in block.on for block in blocks)


def test_ranks_switch_at_the_same_step_and_end_together(tmp_path):
    trial = probed(
        "-m torch.distributed.run",
        *f"--standalone --nproc-per-node 2 {SCRIPTS / 'switched_ranks.py'}".split(),
        probes={"screen": {"choices": [FUSED, COLLECT], "max_s": 4.0, "seed": 0}},
        steps=ENDLESS,
        keep=tmp_path,
        keep_names=("screen-*.jsonl",),
    )

    logs = [
        [row for row in map(json.loads, path.read_text().splitlines()) if "on" in row]
        for path in tmp_path.glob("screen-*.jsonl")
    ]
    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
    assert len(logs) == 2
    assert logs[0] == logs[1]
    assert len(logs[0]) > 3


@pytest.mark.parametrize("loss", [1.0, float("nan")])
def test_a_block_s_losses_are_asked_for_whatever_the_script_s_default_device(monkeypatch, loss):
    empty = torch.empty
    with torch.device("meta"):
        assert empty(()).is_meta  # torch looks up once which functions take the default device
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **named: empty(*sizes, **named))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None))
    screening = Screening(Session(TrialSpec()), {"choices": []})
    screening.device = torch.device("cpu")  # stands for one that is waited for
    block = OpenBlock((), 1, 1, is_first=True, losses=[torch.tensor(loss)], marks=[None])

    with torch.device("meta"):
        screening._ask_finite(block)

    assert block.is_finite.item() is (loss == 1.0)
