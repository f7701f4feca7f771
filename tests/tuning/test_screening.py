"""A tuning whose first experiment is a screen, on trials made up from a known truth."""

import json
import math
from dataclasses import asdict, dataclass, field, replace

import pytest

from flatout.analysis.screen import ScreenBlock
from flatout.records.ablation import Comparison, LossCheck, Verdict, ablation_from_json
from flatout.records.messages import messages
from flatout.records.statistics import Decision
from flatout.records.trial import Outcome, Trial
from flatout.reporting.tuning.verdict import headline
from flatout.tuning.pairs import Match
from flatout.tuning.screening import Raced, _left_open, blame
from flatout.tuning.trial_runner import read_log
from flatout.workflow.tune import TuneOptions, tune
from tests.support.probed import SCRIPTS
from tests.support.programs import workload_of
from tests.support.screens import play_screen, seen_of
from tests.tuning.test_bundle import Clock
from tests.workflow.test_tune import World, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

COMPUTE = ("bf16_autocast", "fused_optimizer", "foreach_optimizer", "torch_compile")


@dataclass
class ScreenedWorld(World):
    """Runs screens too: blocks of a training in which each technique has its true factor."""

    blocks: int = 120
    """Blocks for which the script trains enough."""
    ends: dict[str, str] = field(default_factory=dict)
    """Techniques that end the process of a screen, and what the trial's message is then."""
    screens: int = 0
    screen_noise: float | None = None
    """That of the screen's blocks, where it differs from that of processes."""

    def __call__(self, workload, recipe, machine, options):
        if "screen" not in options.probes:
            return super().__call__(workload, recipe, machine, options)
        self.screens += 1
        played = play_screen(
            options.probes["screen"]["choices"],
            lambda names: 0.1 * math.prod(self.factors.get(name, 1.0) for name in names),
            lambda blocks: [len(blocks) / self.blocks],
            self.noise if self.screen_noise is None else self.screen_noise,
            self.random,
        )
        for cell, names, plan, blocks in played:  # noqa: B007
            guilty = [name for name in names if name in self.ends]
            if guilty:
                return self.ended(recipe, options, blocks[:-1], cell, guilty[0])
        seen = seen_of(plan, blocks)
        return Trial(
            recipe=recipe, outcome=Outcome.OK, wall_s=5.0, details={"probes": {"screen": seen}}
        )

    def ended(self, recipe, options, blocks, cell, name):
        rows = [row for block in blocks for row in ({"on": block.on}, {"block": asdict(block)})]
        text = "".join(json.dumps(row) + "\n" for row in [*rows, {"on": cell}])
        (options.keep / "screen-1.jsonl").write_text(text + '{"block"')
        return Trial(recipe=recipe, outcome=Outcome.CRASH, message=self.ends[name], wall_s=1.0)


def rows_of(ablation):
    return {row.choice.technique: row for row in ablation.rows if row.stage == "add"}


def test_each_technique_of_the_recipe_has_its_own_effect(tmp_path):
    factors = {"bf16_autocast": 0.5, "fused_optimizer": 0.85, "torch_compile": 0.8}
    world = ScreenedWorld(factors)

    ablation = run(world, tmp_path, only=COMPUTE)

    rows = rows_of(ablation)
    assert {*ablation.recipe.names} == {*factors}
    for name, factor in factors.items():
        assert rows[name].verdict is Verdict.KEPT
        assert rows[name].comparison.source == "screen"
        assert rows[name].comparison.ratio == pytest.approx(1 / factor, rel=0.03)
    assert ablation.confirmation.ratio == pytest.approx(1 / math.prod(factors.values()), rel=0.05)
    assert ablation.confirmation.source == "pairs"


def test_a_screen_takes_fewer_trials_than_one_technique_after_the_other(tmp_path):
    factors = {"bf16_autocast": 0.5, "fused_optimizer": 0.85, "torch_compile": 0.8}
    screened, paired = ScreenedWorld(factors), World(factors)

    run(screened, tmp_path / "screened", only=COMPUTE)
    run(paired, tmp_path / "paired", only=COMPUTE)

    assert len(screened.asked) + screened.screens < len(paired.asked)


def test_what_the_screen_calls_no_gain_is_not_tried_again_in_pairs(tmp_path):
    world = ScreenedWorld({"bf16_autocast": 0.5, "fused_optimizer": 1.3})

    ablation = run(world, tmp_path, only=COMPUTE)

    assert rows_of(ablation)["fused_optimizer"].verdict is Verdict.WORSE
    assert not any("fused" in label for label in world.asked)


def test_where_nothing_helps_the_recipe_stays_empty(tmp_path):
    ablation = run(ScreenedWorld({}), tmp_path, only=COMPUTE)

    assert ablation.recipe.choices == ()
    assert Verdict.KEPT not in {row.verdict for row in ablation.rows}


def test_a_script_of_too_few_steps_is_tuned_in_pairs_and_the_report_says_so(tmp_path):
    world = ScreenedWorld({"bf16_autocast": 0.5, "fused_optimizer": 0.8}, blocks=3)

    ablation = run(world, tmp_path, only=("bf16_autocast", "fused_optimizer"))

    assert {*ablation.recipe.names} == {"bf16_autocast", "fused_optimizer"}
    assert any("too few steps to be screened" in note for note in ablation.notes)
    assert {row.comparison.source for row in ablation.rows if row.comparison} == {"pairs"}


def test_a_technique_that_ends_the_process_is_named_and_the_others_are_screened(tmp_path):
    world = ScreenedWorld(
        {"bf16_autocast": 0.5, "torch_compile": 0.8}, ends={"fused_optimizer": "killed"}
    )

    ablation = run(world, tmp_path, only=COMPUTE)

    row = rows_of(ablation)["fused_optimizer"]
    assert row.verdict is Verdict.FAILED
    assert "killed" in row.why
    assert world.screens == 2
    assert {*ablation.recipe.names} == {"bf16_autocast", "torch_compile"}


@pytest.mark.parametrize("ends", [{}, {"fused_optimizer": "killed"}])
def test_a_tuning_that_goes_on_without_a_technique_uses_the_rest_of_its_screen(tmp_path, ends):
    factors = {"bf16_autocast": 0.5, "fused_optimizer": 0.5, "torch_compile": 0.8}
    about = {"ends": ends, "interrupt_after": 3}
    run(ScreenedWorld(factors, **about), tmp_path, only=COMPUTE)

    resumed = ScreenedWorld(factors)
    ablation = run(resumed, tmp_path, only=COMPUTE, skip=("fused_optimizer",), resume=True)

    rows = rows_of(ablation)
    assert resumed.screens == 0
    assert "fused_optimizer" not in rows
    assert {*ablation.recipe.names} == {"bf16_autocast", "torch_compile"}
    for name in ablation.recipe.names:
        assert rows[name].comparison.source == "screen"
        assert rows[name].comparison.ratio == pytest.approx(1 / factors[name], rel=0.05)


def test_the_guard_rejects_one_and_the_rest_is_kept(tmp_path, monkeypatch):
    def check(_, recipe):
        is_wrong = "bf16_autocast" in recipe.names
        return LossCheck(status="rejected" if is_wrong else "within", why="gradients differ")

    monkeypatch.setattr("flatout.workflow.tune.GuardChecker.check", check)
    world = ScreenedWorld({"bf16_autocast": 0.5, "fused_optimizer": 0.8, "torch_compile": 0.8})

    ablation = run(world, tmp_path, only=COMPUTE)

    assert {*ablation.recipe.names} == {"fused_optimizer", "torch_compile"}
    assert rows_of(ablation)["bf16_autocast"].verdict is Verdict.REJECTED


def test_a_screen_is_a_row_of_the_journal_and_is_not_run_again(tmp_path):
    factors = {"bf16_autocast": 0.5, "fused_optimizer": 0.85}
    run(ScreenedWorld(factors, interrupt_after=3), tmp_path, only=COMPUTE)
    resumed = ScreenedWorld(factors, seed=1)

    ablation = run(resumed, tmp_path, only=COMPUTE, resume=True)

    assert resumed.screens == 0
    assert {*ablation.recipe.names} == {*factors}


def test_a_tuning_that_is_interrupted_in_its_screen_goes_on_with_the_screen(tmp_path):
    class Interrupted(ScreenedWorld):
        def __call__(self, workload, recipe, machine, options):
            if "screen" in options.probes:
                raise KeyboardInterrupt
            return super().__call__(workload, recipe, machine, options)

    factors = {"bf16_autocast": 0.5, "fused_optimizer": 0.85}
    before = run(Interrupted(factors), tmp_path, only=COMPUTE)
    resumed = ScreenedWorld(factors)

    ablation = run(resumed, tmp_path, only=COMPUTE, resume=True)

    assert before.stopped == "interrupted"
    assert resumed.screens == 1
    assert {*ablation.recipe.names} == {*factors}


def test_the_source_of_a_number_is_in_the_file(tmp_path):
    ablation = run(ScreenedWorld({"bf16_autocast": 0.5}), tmp_path, only=COMPUTE)

    again = ablation_from_json(json.loads(json.dumps(ablation.to_json())))

    assert rows_of(again)["bf16_autocast"].comparison.source == "screen"


@pytest.mark.slow
def test_a_real_script_is_screened_and_the_screen_is_in_its_journal(tmp_path):
    options = {
        "out": tmp_path / "out",
        "budget_s": 180.0,
        "only": ("fused_optimizer", "foreach_optimizer"),
        "accepts_load": True,
    }
    script = workload_of(tmp_path, str(SCRIPTS / "switched.py"), "plain", "100000")

    ablation = tune(script, TuneOptions(**options), lambda _: None)

    lines = (tmp_path / "out/journal.jsonl").read_text().splitlines()
    (seen,) = [
        row["trial"]["details"]["probes"]["screen"]
        for row in map(json.loads, lines[1:])
        if row["key"].startswith("screen 0 ")
    ]
    assert any("screened in one process" in str(note) for note in ablation.notes)
    assert rows_of(ablation).keys() == {"fused_optimizer", "foreach_optimizer"}
    assert len(seen["blocks"]) > 8
    assert seen["failed"] == seen["refused"] == {}


def test_a_log_that_was_cut_off_blames_what_was_on_last(tmp_path):
    block = asdict(ScreenBlock(on=("one",), step_s=1.0, steps=3))
    rows = [{"on": []}, {"on": ["one"]}, {"block": block}, {"on": ["one", "other"]}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "screen-7.jsonl").write_text(text + '{"blo')
    details = {"screen_log": read_log(tmp_path)}
    trial = Trial(recipe=None, outcome=Outcome.CRASH, message="signal 11", details=details)

    seen = blame(trial, [])

    assert seen["failed"] == {"other": "the script ended while it was on: signal 11"}
    assert len(seen["blocks"]) == 1


def test_a_technique_that_was_screened_and_then_played_in_pairs_has_the_row_of_the_pairs(tmp_path):
    # In the screen it is too noisy to tell; pairs of processes then are not.
    world = ScreenedWorld({"fused_optimizer": 0.93}, blocks=14, screen_noise=0.2)

    ablation = run(world, tmp_path, only=COMPUTE)

    of = {source: set() for source in ("screen", "pairs")}
    for row in ablation.rows:
        if row.stage == "add" and row.comparison:
            of[row.comparison.source].add(row.choice.label)
    assert of["pairs"]
    assert not of["screen"] & of["pairs"]


PACES = ((0, 0, 100.0), (1, 0, 95.0), (2, 0, 98.0), (1, 1, 60.0), (2, 1, 62.0), (0, 0, 100.0))
"""Workers, threads and milliseconds a batch: one worker pays once the training uses one thread."""


@dataclass
class ShortWorld(ScreenedWorld):
    """Trials take 8 s and the guard 60 s, and a scan sees workers and fewer threads that help."""

    clock: Clock = field(default_factory=Clock)

    def __call__(self, workload, recipe, machine, options):
        if "worker_scan" in options.probes:
            self.clock.now += 30.0
            visits = [
                {"num_workers": n, "prefetch_factor": 2, "threads": threads, "batch_ms": ms}
                | {"start_ms": 10.0}
                for n, threads, ms in PACES
            ]
            seen = {"visits": visits, "epoch_batches": None, "stopped": "", "unvisited": []}
            details = {"probes": {"worker_scan": seen}}
            return Trial(recipe=recipe, outcome=Outcome.OK, wall_s=30.0, details=details)
        trial = super().__call__(workload, recipe, machine, options)
        wall_s = 60.0 if "screen" in options.probes else 8.0
        self.clock.now += wall_s
        return replace(trial, wall_s=wall_s)


SHORT = (*COMPUTE, "loader_workers", "cpu_threads")
SHORT_FACTORS = {"bf16_autocast": 0.6, "fused_optimizer": 0.9, "cpu_threads": 0.6}


def guard_of_a_minute(world, checks):
    def check(_, recipe):
        world.clock.now += 60.0 if not checks else 24.0
        checks.append(recipe.names)
        return LossCheck(status="within")

    return check


def test_with_little_time_what_a_scan_saw_is_on_through_the_screen_and_one_race_proves_it_all(
    tmp_path, monkeypatch
):
    world, checks = ShortWorld(SHORT_FACTORS), []
    monkeypatch.setattr(
        "flatout.workflow.tune.GuardChecker.check", guard_of_a_minute(world, checks)
    )

    ablation = run(world, tmp_path, only=SHORT, budget_s=300.0, clock=world.clock)

    assert {"loader_workers", "cpu_threads", "bf16_autocast"} <= {*ablation.recipe.names}
    assert ablation.confirmation.source == "pairs"
    assert world.clock.now <= 300.0
    assert len(checks) == 1
    rows = rows_of(ablation)
    assert rows["bf16_autocast"].comparison.source == "screen"
    assert {rows[x].verdict for x in ("loader_workers", "cpu_threads")} == {Verdict.TOGETHER}
    assert "on all through the screen" in rows["cpu_threads"].why
    assert {"loader_workers", "cpu_threads"} <= {*rows["bf16_autocast"].on_top_of}


def test_a_pair_that_the_guard_rejects_is_named_and_the_rest_is_kept(tmp_path, monkeypatch):
    def check(_, recipe):
        is_wrong = "cpu_threads" in recipe.names
        return LossCheck(status="rejected" if is_wrong else "within", why="gradients differ")

    monkeypatch.setattr("flatout.workflow.tune.GuardChecker.check", check)
    world = ShortWorld(SHORT_FACTORS)

    ablation = run(world, tmp_path, only=SHORT, budget_s=400.0, clock=world.clock)

    assert "bf16_autocast" in ablation.recipe.names
    assert "cpu_threads" not in ablation.recipe.names
    assert rows_of(ablation)["cpu_threads"].verdict is Verdict.REJECTED


@pytest.mark.parametrize(
    ("budget_s", "guard_s"),
    # A proof that takes half of the budget is made beyond it: without, all before was for nothing.
    [(120.0, 60.0), (200.0, 0.0), (300.0, 0.0), (600.0, 0.0)],
)
def test_the_budget_holds_to_within_a_tenth_whatever_the_noise(
    tmp_path, monkeypatch, budget_s, guard_s
):
    world, checks = ShortWorld(SHORT_FACTORS, noise=0.2), []
    monkeypatch.setattr(
        "flatout.workflow.tune.GuardChecker.check", guard_of_a_minute(world, checks)
    )

    run(world, tmp_path, only=SHORT, budget_s=budget_s, clock=world.clock)

    assert world.clock.now <= 1.1 * budget_s + guard_s


def test_what_the_screen_saw_counts_in_its_race(tmp_path, monkeypatch):
    # Equal trials differ by 20 %: three pairs alone prove no gain below 2x.
    world, checks = ShortWorld({"bf16_autocast": 0.6}, noise=0.2), []
    monkeypatch.setattr(
        "flatout.workflow.tune.GuardChecker.check", guard_of_a_minute(world, checks)
    )

    ablation = run(world, tmp_path, only=COMPUTE, budget_s=200.0, clock=world.clock)

    proof = ablation.confirmation
    assert ablation.recipe.names == ("bf16_autocast",)
    assert proof.n >= 3
    assert proof.blocks > 0
    assert proof.interval[0] < 1 / 0.6 < proof.interval[1]


def test_an_end_during_the_race_leaves_what_the_screen_showed(tmp_path):
    world = ScreenedWorld({"bf16_autocast": 0.5, "fused_optimizer": 0.8}, interrupt_after=1)

    ablation = run(world, tmp_path, only=COMPUTE)

    assert ablation.stopped == "interrupted"
    row = rows_of(ablation)["bf16_autocast"]
    assert row.verdict is Verdict.INCONCLUSIVE
    assert row.comparison.source == "screen"
    assert "ended before fresh processes" in row.why


def test_a_recipe_that_does_not_run_in_a_fresh_process_says_so(tmp_path):
    @dataclass
    class Incompatible(ScreenedWorld):
        def __call__(self, workload, recipe, machine, options):
            trial = super().__call__(workload, recipe, machine, options)
            if len(recipe.names) < 2 or "screen" in options.probes:
                return trial
            return Trial(recipe=recipe, outcome=Outcome.CRASH, message="no kernel", wall_s=1.0)

    world = Incompatible({"bf16_autocast": 0.5, "fused_optimizer": 0.8})

    ablation = run(world, tmp_path, only=("bf16_autocast", "fused_optimizer"))

    assert ablation.recipe.names == ("bf16_autocast",)
    said = [row.why for row in ablation.rows if row.choice.technique == "fused_optimizer"]
    assert any("no kernel" in why for why in said)


def test_what_the_guard_rejects_without_a_name_is_not_held_against_each(tmp_path, monkeypatch):
    def check(_, recipe):
        is_wrong = len(recipe.names) > 1
        return LossCheck(status="rejected" if is_wrong else "within", why="gradients differ")

    monkeypatch.setattr("flatout.workflow.tune.GuardChecker.check", check)
    # No time for the bisection.
    monkeypatch.setattr("flatout.tuning.screening.settle_guilty", unsettled)
    world = ScreenedWorld({"bf16_autocast": 0.5, "fused_optimizer": 0.8})

    ablation = run(world, tmp_path, only=("bf16_autocast", "fused_optimizer"))

    assert ablation.recipe.names == ("bf16_autocast",)


def unsettled(*_):
    return ()
    yield


def test_a_race_that_time_cut_short_is_an_open_answer(tmp_path, monkeypatch):
    world, checks = ShortWorld({"bf16_autocast": 0.75}, noise=0.35, seed=3), []
    monkeypatch.setattr(
        "flatout.workflow.tune.GuardChecker.check", guard_of_a_minute(world, checks)
    )

    ablation = run(world, tmp_path, only=("bf16_autocast",), budget_s=60.0, clock=world.clock)

    assert not ablation.recipe.choices
    assert ablation.stopped == "budget"
    assert messages("en").text(headline(ablation)).startswith("No answer yet")


def test_a_race_that_decided_nothing_has_a_row_with_all_that_ran_in_it(tmp_path, monkeypatch):
    cell = ("bf16_autocast", "fused_optimizer")
    pair = Comparison(ratio=1.32, interval=(0.98, 1.77), n=2)

    def race(*_):
        return Raced(undecided=dict.fromkeys(cell, "no time"), open=(cell, pair))
        yield

    monkeypatch.setattr("flatout.tuning.screening._race", race)
    world = ScreenedWorld({"bf16_autocast": 0.5, "fused_optimizer": 0.8})

    ablation = run(world, tmp_path, only=cell)

    (row,) = [row for row in ablation.rows if row.together_with and row.comparison == pair]
    assert (row.choice.technique, *row.together_with) == cell
    assert row.verdict is Verdict.INCONCLUSIVE
    assert row.why.endswith("in fresh processes, together with fused_optimizer")
    own = [r for r in ablation.rows if r.stage == "add" and not r.together_with]
    alone = {r.choice.technique: r.predicted_ratio for r in own}
    assert row.predicted_ratio == pytest.approx(math.prod(alone[name] for name in cell))


def test_why_a_race_decided_nothing_is_said_of_each_that_ran_in_no_later_one():
    failed = Trial(recipe=None, outcome=Outcome.CRASH, message="no kernel")
    unplayed = Match()

    first = _left_open({}, ("one", "two"), replace(unplayed, failure=failed))
    second = _left_open(first, ("one",), replace(unplayed, decision=Decision.NO_EFFECT))

    assert first["one"] == first["two"]
    assert second == {"two": first["two"]}
    assert "no kernel" in second["two"]
