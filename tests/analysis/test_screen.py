"""Screening designs and fits against step times whose truth is known."""

import itertools
import math
import random

import numpy as np
import pytest

from flatout.analysis.screen import (
    LOAD_LIMIT,
    ScreenBlock,
    ScreenFactor,
    ScreenPlan,
    counting,
    find_suspects,
    fit_blocks,
    hadamard,
    own_effects,
    replicate,
)
from tests.support.screens import play_screen

TRUTH = {"half": 2.0, "fused": 1.15, "slow": 0.7, "nothing": 1.0}


def factors(truth, *, last=(), groups=None):
    groups = groups or {}
    return [
        ScreenFactor(label=label, group=groups.get(label, ""), is_last=label in last)
        for label in truth
    ]


def block(on, truth, noise=0.0, **facts):
    log_s = -sum(math.log(truth[label]) for label in on) + noise
    return ScreenBlock(on=tuple(on), step_s=0.1 * math.exp(log_s), steps=4, **facts)


def design_blocks(truth, rounds, seed=0, deviation=0.02, **facts):
    deal = random.Random(seed)
    cells = [cell for _ in range(rounds) for cell in replicate([[x] for x in truth], deal)]
    return [block(cell, truth, deal.gauss(0, deviation), **facts) for cell in cells]


def screened(truth, seed, *, deviation=0.02, most=160, drift=0.0, outliers=0.0, **about):
    deal = random.Random(seed)
    plan = ScreenPlan(factors(truth, **about), seed=seed)
    blocks = []
    while (cell := plan.next_cell(blocks, len(blocks) / most)) is not None:
        noise = deal.gauss(0, deviation) + drift * len(blocks)
        noise += 0.5 * (deal.random() < outliers)
        stage = plan.stage.removeprefix("introduce ")
        blocks.append(block(cell, truth, noise, stage=stage))
    return plan, blocks


@pytest.mark.parametrize("order", [1, 2, 3, 4, 8, 12, 16, 20, 24])
def test_the_columns_of_a_hadamard_matrix_are_orthogonal(order):
    matrix = hadamard(order)

    assert len(matrix) >= order
    assert np.array_equal(matrix @ matrix.T, len(matrix) * np.eye(len(matrix)))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11])
def test_each_technique_and_each_pair_is_on_equally_often_in_a_replicate(count):
    labels = [f"t{number}" for number in range(count)]

    cells = replicate([[label] for label in labels], random.Random(0))

    for label in labels:
        assert 2 * sum(label in cell for cell in cells) == len(cells)
    for one, other in itertools.combinations(labels, 2):
        together = sum({one, other} <= {*cell} for cell in cells)
        assert 4 * together == len(cells)


def test_no_main_effect_is_confounded_with_two_others_together():
    labels = [f"t{number}" for number in range(8)]

    cells = replicate([[label] for label in labels], random.Random(1))

    sign = {x: np.array([1 if x in cell else -1 for cell in cells]) for x in labels}
    for one, other, third in itertools.combinations(labels, 3):
        assert sign[one] @ (sign[other] * sign[third]) == 0


def test_of_alternatives_at_most_one_is_on_and_each_has_its_turn():
    cells = replicate([["a", "b"], ["c"]], random.Random(0))

    assert not any({"a", "b"} <= {*cell} for cell in cells)
    assert any("a" in cell for cell in cells)
    assert any("b" in cell for cell in cells)


def test_known_effects_are_found_within_their_intervals():
    fit = fit_blocks(design_blocks(TRUTH, rounds=4), factors(TRUTH))

    for label, ratio in TRUTH.items():
        low, high = fit.effect(label, ()).interval
        assert low * 0.98 < ratio < high * 1.02
        assert high / low < 1.1


def test_blocks_that_others_disturbed_are_thrown_away():
    quiet = design_blocks(TRUTH, rounds=3)
    loud = [block(b.on, TRUTH, 1.0, load_share=2 * LOAD_LIMIT) for b in quiet[:8]]

    assert counting([*quiet, *loud]) == quiet
    assert fit_blocks([*quiet, *loud], factors(TRUTH)).residual_sd < 0.04


def test_where_most_blocks_are_disturbed_all_count():
    loud = design_blocks(TRUTH, rounds=3, load_share=2 * LOAD_LIMIT)

    assert counting(loud) == loud


def test_a_block_with_an_evaluation_does_not_count():
    blocks = design_blocks(TRUTH, rounds=3)
    mixed = block(("half",), TRUTH, 2.0, left_out="an evaluation")

    assert counting([*blocks, mixed]) == blocks


def test_single_outliers_hardly_move_an_effect():
    blocks = design_blocks(TRUTH, rounds=6)
    spoilt = [block(b.on, TRUTH, 0.8) if number % 12 == 5 else b for number, b in enumerate(blocks)]

    effect = fit_blocks(spoilt, factors(TRUTH)).effect("fused", ())

    assert abs(effect.log_ratio - math.log(1.15)) < 0.05


def test_two_processes_and_parts_of_one_have_levels_of_their_own():
    first = design_blocks(TRUTH, rounds=2)
    second = design_blocks(TRUTH, rounds=2, seed=1, process=1)
    slower = [ScreenBlock(on=b.on, step_s=3 * b.step_s, steps=b.steps, process=1) for b in second]

    effect = fit_blocks([*first, *slower], factors(TRUTH)).effect("half", ())

    assert abs(effect.log_ratio - math.log(2.0)) < 0.05


def test_batches_that_grow_are_no_technique_s_doing():
    grown = [
        ScreenBlock(on=b.on, step_s=b.step_s * (1 + n // 24), steps=4, samples=8.0 * (1 + n // 24))
        for n, b in enumerate(design_blocks(TRUTH, rounds=6))
    ]

    fit = fit_blocks(grown, factors(TRUTH))

    assert fit.residual_sd < 0.05
    assert abs(fit.effect("fused", ()).log_ratio - math.log(1.15)) < 0.05


def test_an_interaction_that_is_named_changes_the_effect_in_the_recipe():
    deal = random.Random(3)
    both = [
        ScreenFactor(label="layout", partners=("half",)),
        ScreenFactor(label="half"),
    ]
    blocks = [
        ScreenBlock(
            on=cell,
            step_s=math.exp(
                deal.gauss(0, 0.01)
                - 0.5 * ("half" in cell)
                + (0.1 if cell == ("layout",) else 0)
                - 0.2 * (len(cell) == 2)
            ),
            steps=4,
        )
        for _ in range(6)
        for cell in replicate([["layout"], ["half"]], deal)
    ]

    fit = fit_blocks(blocks, both)

    assert fit.effect("layout", ()).log_ratio == pytest.approx(-0.1, abs=0.03)
    assert fit.effect("layout", ("half",)).log_ratio == pytest.approx(0.2, abs=0.03)
    assert {*fit.best()} == {"layout", "half"}


def test_an_interaction_that_no_one_named_is_found_in_the_residuals():
    deal = random.Random(5)
    truth = dict.fromkeys("abcd", 1.2)
    blocks = [
        block(cell, truth, deal.gauss(0, 0.01) + 0.3 * ({"a", "b"} <= {*cell}))
        for _ in range(5)
        for cell in replicate([[x] for x in truth], deal)
    ]

    fit = fit_blocks(blocks, factors(truth))

    assert ("a", "b") in fit.terms
    assert not {"a", "b"} <= {*fit.best()}


def test_the_plan_finds_the_recipe_and_each_technique_s_own_effect():
    truth = {**TRUTH, "compile": 1.28}

    plan, blocks = screened(truth, 0, last=("compile",), drift=0.0005, outliers=0.03)
    own = own_effects(blocks[plan.credit_from :], plan.factors, tuple(plan.on))

    assert {*plan.on} == {"half", "fused", "compile"}
    for label, effect in own.items():
        assert abs(effect.log_ratio - math.log(truth[label])) < 0.03


def test_what_comes_last_is_on_only_with_what_the_others_settled():
    truth = {**TRUTH, "compile": 1.28}

    plan, blocks = screened(truth, 1, last=("compile",))

    with_it = [b for b in blocks[: plan.credit_from] if "compile" in b.on]
    assert {frozenset(b.on) - {"compile"} for b in with_it} == {frozenset({"half", "fused"})}


LAST = {"half": 2.0, "blocks": 1.2, "cheap": 1.1, "whole": 1.3}
"""Two that compile and are rivals, and one that needs no start; "half" comes before them."""


def last_ones(used_share, startup_share, *, until="credit"):
    """Return the cells of those that come last, so much of the time being used from then on."""
    kinds = {"blocks": "compile", "whole": "compile"}
    plan = ScreenPlan(factors(LAST, last=("blocks", "cheap", "whole"), groups=kinds))
    blocks, cells = [], []
    while plan.stage != until:
        used = 0.1 if plan.stage == "screen" else used_share
        cell = plan.next_cell(blocks, used, startup_share)
        if cell is None:
            break
        blocks.append(block(cell, LAST, stage=plan.stage.removeprefix("introduce ")))
        cells += [cell] if plan.stage != "screen" else []
    return cells


def test_of_those_that_come_last_rivals_are_begun_one_at_a_time_and_others_at_once():
    cells = last_ones(0.2, 0.1)

    assert cells[:3] == [("half",), ("blocks", "half"), ("cheap", "half")]
    assert cells[3:5] == [("half",), ("half", "whole")]


@pytest.mark.parametrize(("used_share", "is_begun"), [(0.75, True), (0.85, False)])
def test_a_further_rival_is_begun_where_its_start_fits_in(used_share, is_begun):
    cells = last_ones(used_share, 0.1)

    assert any("whole" in cell for cell in cells) == is_begun
    assert any("cheap" in cell for cell in cells)


@pytest.mark.parametrize(("used_share", "compiles"), [(0.5, True), (0.7, False)])
def test_late_in_a_screen_no_other_model_is_compiled_for_a_technique_s_own_effect(
    used_share, compiles
):
    cells = last_ones(used_share, 0.1, until="over")

    without_half = [x for x in cells if {"blocks", "whole"} & {*x} and "half" not in x]
    assert bool(without_half) == compiles


def test_what_has_lost_its_last_rival_is_settled_with_it():
    truth = {"one": 1.5, "other": 1.2, "half": 2.0}

    plan, blocks = screened(truth, 0, deviation=0.002, groups={"one": "kind", "other": "kind"})

    alone, one_design = 1 + len(truth), 8
    assert (len(blocks[: plan.credit_from]) - alone) // one_design <= 2
    assert {*plan.on} == {"one", "half"}
    assert plan.open == []


def test_of_two_alternatives_the_faster_one_is_proposed():
    truth = {"one": 1.1, "other": 1.3, "half": 2.0}

    plan, _ = screened(truth, 2, groups={"one": "kind", "other": "kind"})

    assert {*plan.on} == {"other", "half"}


def test_the_same_blocks_give_the_same_plan():
    _, first = screened(TRUTH, 4)
    _, second = screened(TRUTH, 4)

    assert first == second


def test_a_technique_that_is_dropped_is_on_in_no_later_block():
    plan = ScreenPlan(factors(TRUTH))
    cells = [plan.next_cell([], 0.0)]

    plan.drop("half")
    cells += [plan.next_cell([], 0.0) for _ in range(8)]

    assert not any("half" in cell for cell in cells)


def test_a_plan_ends_with_its_time():
    plan = ScreenPlan(factors(TRUTH))

    assert plan.next_cell([], 0.99) is not None
    assert plan.next_cell([], 1.0) is None


def test_too_few_blocks_have_no_effects():
    blocks = [block((), TRUTH), block(("half",), TRUTH), block((), TRUTH)]

    assert fit_blocks(blocks, factors(TRUTH)) is None


@pytest.mark.slow
def test_a_technique_that_does_nothing_is_seldom_called_a_gain():
    truth = {"a": 1.0, "b": 1.0, "c": 1.0, "half": 2.0}
    called = 0

    for seed in range(40):
        plan, blocks = screened(truth, seed, deviation=0.03, outliers=0.03, most=100)
        own = own_effects(blocks[plan.credit_from :], plan.factors, tuple(sorted(plan.on)))
        called += sum(own[x].bound(0.998, -1) > math.log(1.02) for x in own if truth[x] == 1)

    assert called <= 1  # of 120


def test_the_failure_of_a_block_is_blamed_on_what_never_worked():
    worked = block(("half",), TRUTH)

    assert find_suspects(("half", "fused"), [worked]) == ["fused"]
    assert find_suspects(("half",), [worked]) == ["half"]


@pytest.mark.parametrize("seed", range(6))
def test_what_saves_little_of_a_long_step_is_asked_about_again_on_the_short_one(seed):
    saves_ms = {"bf16": 220, "compile": 85, "fused": 2.5, "nothing": 0}
    deal = random.Random(seed)
    choices = [{"label": x, "group": x, "technique": x} for x in saves_ms]

    def step_s(names):
        return (365 - sum(saves_ms[name] for name in names)) / 1e3

    for _, _, plan, blocks in play_screen(  # noqa: B007
        choices, step_s, lambda blocks: (len(blocks) / 120, 0.02), 0.003, deal
    ):
        pass

    assert sorted(plan.on) == ["bf16", "compile", "fused"]
    own = own_effects(blocks[plan.credit_from :], plan.factors, tuple(plan.on))
    assert own["fused"].ratio == pytest.approx(1 + 2.5 / 57.5, abs=0.01)
