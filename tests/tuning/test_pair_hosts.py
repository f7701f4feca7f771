"""Other hosts play pairs, and the verdicts are those of one host."""

import contextlib
import json
from dataclasses import replace

import pytest

from flatout.records.ablation import Verdict
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome, Trial, Workload
from flatout.tuning.experiments import Experiment, key_of
from flatout.tuning.pair_hosts import HostTask, PairHosts, play_task
from tests.workflow.test_tune import WORKLOAD, World, profile, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

BF16 = Recipe(choices=(Choice(technique="bf16_autocast"),))
FUSED = Recipe(choices=(Choice(technique="fused_optimizer"),))
BUSY = {"foreign_share": 0.5, "delay_share": 0.8, "steal_share": 0.0, "wall_s": 2.0}
ONLY = ("bf16_autocast",)


class Elsewhere:
    """A host that plays at once what it is asked for, in this process."""

    def __init__(self, name, world, *, step_times=1.0, lost_after=10**9):
        self.name, self.world = name, world
        self.step_times, self.lost_after = step_times, lost_after
        self.tasks, self.cancelled, self.played = [], 0, ()

    def begin(self, task):
        self.tasks.append(task)
        self.played = play_task(WORKLOAD, task, 60.0, run=self.trial, wait=lambda _most_s: None)
        if len(self.tasks) > self.lost_after:
            self.played = "the node died"

    def trial(self, *asked):
        found = self.world(*asked)
        if found.profile is None:
            return found
        return replace(found, profile=profile(self.step_times * found.profile.step_ms.median))

    def is_done(self):
        return True

    def result(self):
        return self.played

    def cancel(self):
        self.cancelled += 1

    @property
    def pairs(self):
        return [task for task in self.tasks if task.candidate]


def on(*hosts):
    return lambda _workload, _limit_s, say: contextlib.nullcontext(
        PairHosts(hosts=[*hosts], say=say)
    )


def journal(folder):
    lines = (folder / "journal.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def played_pairs(folder):
    return [row["pair"] for row in journal(folder) if row.get("pair")]


def test_a_pair_is_of_one_host_however_different_the_hosts_are(tmp_path):
    slow = Elsewhere("slow", World({"bf16_autocast": 0.6}, seed=1), step_times=3.0)
    fast = Elsewhere("fast", World({"bf16_autocast": 0.6}, seed=2), step_times=0.5)

    world = World({"bf16_autocast": 0.6})
    ablation = run(world, tmp_path, only=ONLY, hosts=on(slow, fast), confirm_pairs=6)

    assert ablation.recipe.names == ONLY
    assert ablation.confirmation.ratio == pytest.approx(1 / 0.6, rel=0.05)
    low, high = ablation.confirmation.interval
    assert high / low < 1.2
    pairs = played_pairs(tmp_path)
    assert {pair[0]["details"]["host"] for pair in pairs} == {"slow", "fast"}
    assert all(base["details"]["host"] == other["details"]["host"] for base, other in pairs)
    assert all(not base["recipe"]["choices"] for base, _other in pairs)


def test_the_report_says_on_how_many_hosts_it_was_measured(tmp_path):
    other = Elsewhere("other", World({"bf16_autocast": 0.6}, seed=1))

    ablation = run(World({"bf16_autocast": 0.6}), tmp_path, only=ONLY, hosts=on(other))

    pairs = len(played_pairs(tmp_path))
    assert pairs > 0
    said = f"measured on 2 hosts, each pair of trials on one of them; {pairs} pairs on others"
    assert any(note.startswith(said) for note in ablation.notes)


def test_more_hosts_change_no_verdict_and_no_number_of_pairs(tmp_path):
    factors = {"bf16_autocast": 0.6, "loader_workers": 0.7, "fused_optimizer": 1.2}
    hosts = [Elsewhere(str(n), World(factors, noise=0.0)) for n in range(3)]

    alone = run(World(factors, noise=0.0), tmp_path / "alone", only=tuple(factors))
    together = run(
        World(factors, noise=0.0), tmp_path / "hosts", only=tuple(factors), hosts=on(*hosts)
    )

    def shown(ablation):
        return [(x.choice.label, x.verdict, x.comparison.n) for x in ablation.rows if x.comparison]

    assert shown(together) == shown(alone)
    assert together.recipe.label == alone.recipe.label
    assert together.resolution == pytest.approx(alone.resolution)
    assert sum(len(host.pairs) for host in hosts) > 0


def asked_for(candidate, *, starts_with_base=True, most=9):
    options = {"base": Recipe(), "starts_with_base": starts_with_base, "most": most}
    return Experiment(kind="pair", recipe=candidate, name=key_of(Recipe()), options=options)


def warm(*hosts):
    """Return hosts that have had their first trial."""
    found = PairHosts(hosts=[*hosts])
    assert found.next_pair(asked_for(BF16)) == ()
    assert [task for host in hosts for task in host.tasks] == [HostTask(base=Recipe())] * len(hosts)
    return found


def test_a_host_has_a_trial_that_counts_for_nothing_before_its_first_pair():
    host = Elsewhere("other", World({}))

    hosts = warm(host)

    assert hosts.next_pair(asked_for(BF16)) == ()  # played here, and the next one there
    assert host.pairs == [HostTask(base=Recipe(), candidate=BF16, starts_with_base=False)]


def test_pairs_count_in_the_order_in_which_they_were_asked_for():
    one, two = Elsewhere("one", World({})), Elsewhere("two", World({}))
    hosts = warm(one, two)
    hosts.next_pair(asked_for(BF16))

    first, second = (hosts.next_pair(asked_for(BF16)) for _ in range(2))

    assert [trial.details["host"] for trial in first] == ["one", "one"]
    assert [trial.details["host"] for trial in second] == ["two", "two"]
    assert [one.pairs[0].starts_with_base, two.pairs[0].starts_with_base] == [False, True]
    assert hosts.next_pair(asked_for(BF16)) == ()  # the next ones begin


def test_no_more_pairs_are_begun_than_may_be_wanted():
    hosts = [Elsewhere(str(n), World({})) for n in range(3)]
    warmed = warm(*hosts)

    warmed.next_pair(asked_for(BF16, most=1))

    assert [len(host.pairs) for host in hosts] == [1, 0, 0]


def test_pairs_that_no_one_asks_for_any_more_are_ended_before_others_begin():
    host = Elsewhere("other", World({}))
    hosts = warm(host)
    hosts.next_pair(asked_for(BF16))

    found = hosts.next_pair(asked_for(FUSED))

    assert found == ()
    assert host.cancelled == 1
    assert host.pairs[-1].candidate == FUSED


def test_a_host_that_still_ends_what_was_cancelled_begins_nothing(monkeypatch):
    monkeypatch.setattr("flatout.tuning.pair_hosts.CANCEL_S", 0.0)
    host = Elsewhere("other", World({}))
    hosts = warm(host)
    hosts.next_pair(asked_for(BF16))
    host.is_done = lambda: False

    hosts.next_pair(asked_for(FUSED))

    assert len(host.pairs) == 1


@pytest.mark.chaos
def test_a_host_that_is_lost_costs_its_pair_and_nothing_else(tmp_path):
    factors = {"bf16_autocast": 0.6, "loader_workers": 0.7}
    host = Elsewhere("other", World(factors, noise=0.0), lost_after=2)

    alone = run(World(factors, noise=0.0), tmp_path / "alone", only=tuple(factors))
    ablation = run(
        World(factors, noise=0.0), tmp_path / "hosts", only=tuple(factors), hosts=on(host)
    )

    assert ablation.recipe.label == alone.recipe.label
    assert ablation.stopped == "finished"
    assert len(host.tasks) == 3  # its first trial, a pair that counts, and the one it was lost with
    assert len(played_pairs(tmp_path / "hosts")) == 1
    assert "no more pairs were played on other: the node died" in ablation.notes


def test_what_fails_on_another_host_alone_is_no_verdict(tmp_path):
    host = Elsewhere("other", World({}, broken=ONLY))

    ablation = run(World({"bf16_autocast": 0.6}), tmp_path, only=ONLY, hosts=on(host))

    assert ablation.rows[0].verdict is Verdict.KEPT
    assert len(host.pairs) == 1
    (note,) = [note for note in ablation.notes if "other" in note and "no more pairs" in note]
    assert "crash: RuntimeError: no" in note


def test_a_host_on_which_the_script_does_not_run_plays_no_pair(tmp_path):
    def crash(_workload, recipe, _machine, _options):
        return Trial(recipe=recipe, outcome=Outcome.CRASH, message="no data", wall_s=1.0)

    host = Elsewhere("other", crash)

    ablation = run(World({"bf16_autocast": 0.6}), tmp_path, only=ONLY, hosts=on(host))

    assert ablation.recipe.names == ONLY
    assert host.pairs == []
    said = "other: a trial there gave no measurement: crash: no data"
    assert any(said in note for note in ablation.notes)


def test_a_pair_that_failed_and_that_no_one_asked_for_says_nothing_of_its_host():
    host = Elsewhere("other", World({}, broken=ONLY))
    hosts = warm(host)
    hosts.next_pair(asked_for(BF16))  # fails here, too, so its race is over

    hosts.next_pair(asked_for(FUSED))

    assert hosts.hosts == [host]
    assert hosts.notes == []
    assert host.pairs[-1].candidate == FUSED


@pytest.mark.chaos
@pytest.mark.parametrize("has_hosts", [True, False])
def test_a_tuning_that_goes_on_replays_the_pairs_of_other_hosts(tmp_path, has_hosts):
    factors = {"bf16_autocast": 0.6, "loader_workers": 0.7}
    only = tuple(factors)
    first = Elsewhere("other", World(factors))
    run(World(factors, interrupt_after=9), tmp_path, only=only, hosts=on(first))
    before = len(played_pairs(tmp_path))
    again = Elsewhere("other", World(factors, seed=1))

    ablation = run(
        World(factors, seed=1),
        tmp_path,
        only=only,
        resume=True,
        hosts=on(again) if has_hosts else None,
    )

    assert before > 0
    assert ablation.recipe.names == run(World(factors), tmp_path / "whole", only=only).recipe.names
    more = len(played_pairs(tmp_path)) - before
    assert (more > 0) == has_hosts
    assert any(note.startswith("measured on 2 hosts") for note in ablation.notes)


def pair(world, *, starts_with_base=True):
    task = HostTask(base=Recipe(), candidate=BF16, starts_with_base=starts_with_base)
    return play_task(Workload(target="train.py"), task, 60.0, run=world, wait=lambda _most_s: None)


@pytest.mark.parametrize("starts_with_base", [True, False])
def test_the_base_comes_first_in_whichever_order_they_were_played(starts_with_base):
    world = World({"bf16_autocast": 0.5})

    base, candidate = pair(world, starts_with_base=starts_with_base)

    assert (base.recipe, candidate.recipe) == (Recipe(), BF16)
    in_order = ["baseline", "bf16_autocast"]
    assert world.asked == (in_order if starts_with_base else in_order[::-1])


def test_what_a_device_runs_is_not_looked_at_elsewhere():
    traced = []

    def seen(workload, recipe, machine, options):
        traced.append(options.traces_kernels)
        return World({})(workload, recipe, machine, options)

    pair(seen)

    assert traced == [False, False]


@pytest.mark.chaos
def test_a_pair_that_other_work_disturbed_does_not_count():
    why = pair(World({}, load=BUSY))

    assert isinstance(why, str)
    assert "busy" in why
