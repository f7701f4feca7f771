"""Numbers of one report that a reader holds against each other agree, whatever was measured."""

import importlib
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout import rules
from flatout.analysis.profile import ceilings_of
from flatout.analysis.regime import best_case, data_share, held_to_phases, with_regime
from flatout.records import catalogue
from flatout.records.journey import TRAINING, WORKERS, Journey, Pipeline, Stage
from flatout.records.messages import LANGUAGES, messages
from flatout.records.profile import PHASES, Ceilings, RareWork, Spread, most_times
from flatout.records.readings import (
    CompileFacts,
    IdleSplit,
    Limits,
    RankFacts,
    SyncPoint,
    TraceSummary,
)
from flatout.records.units import format_bytes, format_ratio, format_share
from flatout.reporting.blocks import Table
from flatout.reporting.profile import sentences
from flatout.reporting.profile.tables import details
from flatout.reporting.profile.text import render_profile
from tests.rules.journey_facts import leg, worker
from tests.rules.memory_facts import story
from tests.techniques.facts import gpu, loader, machine, model, optimizer, profile

EXACT = 1e-6
ENGLISH = messages("en")
HOST = machine(cpu_features=frozenset({"amx_bf16"}), device=gpu(), usable_cores=2)
TIMES = st.sampled_from([0.0, 1e-4, 0.02]) | st.floats(0.01, 500.0)
SHARES = st.floats(0.0, 1.0)
RATIOS = st.floats(1.0, 60.0)
ZERO = re.compile(r"(?<![\d.,<])0(?:\.0+)? (?:cores|[kMGT]?FLOP|MiB|GiB|KiB|bytes|%)")


def headline(facts):
    return ENGLISH.text(sentences.headline(facts))


def readings(facts):
    return {name: ENGLISH.text(text) for name, text in sentences.readings(facts)}


def ceilings(facts):
    return ENGLISH.text(sentences.ceilings_sentence(facts))


def section(facts, name):
    """Return every cell of a section's tables, row by row."""
    (found,) = (part for part in details(facts) if part.name == name)
    tables = [block for block in found.blocks if isinstance(block, Table)]
    return [tuple(map(ENGLISH.text, row)) for block in tables for row in block.rows]


@st.composite
def rare_work(draw):
    steps = draw(st.integers(3, 50))
    return RareWork(
        share=draw(SHARES),
        ms=draw(TIMES),
        steps=steps,
        of_steps=steps * draw(st.integers(1, 9)),
        saving_share=draw(SHARES),
        waiting_share=draw(SHARES),
    )


@st.composite
def pipelines(draw):
    cpu_ms = draw(st.floats(0.001, 50.0))
    rate = draw(st.floats(0.1, 5000.0))
    return Pipeline(
        stages=(
            Stage(name="read", cpu_ms=1e-4 * cpu_ms, share=1e-4, wait_ms=draw(TIMES)),
            Stage(name="decode", cpu_ms=0.9999 * cpu_ms, share=0.9999, techniques=("fast_decode",)),
        ),
        samples=64,
        cpu_ms=cpu_ms,
        samples_per_s=rate,
        cores_needed=rate * cpu_ms / 1e3,
        usable_cores=2.0,
    )


@st.composite
def journeys(draw, workers):
    read_ms, decode_ms = draw(st.floats(0.01, 300.0)), draw(st.floats(0.01, 300.0))
    where = WORKERS if workers else TRAINING
    stored = draw(st.none() | st.floats(0.0, 1e6))
    facts = [worker(number, storage_bytes_per_step=stored) for number in range(workers)]
    return Journey(
        legs=(leg("read", read_ms, where=where), leg("decode", decode_ms, where=where)),
        workers=tuple(facts) or (worker(-1, storage_bytes_per_step=stored),),
    )


@st.composite
def profiles(draw):
    """A profile as a measurement gives it: its ceilings and regime follow from what was seen."""
    phases = {phase: draw(TIMES) for phase in PHASES}
    phases["backward"] += 0.001
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    if kind == "cpu":
        phases["h2d"] = 0.0
    step_ms, workers = sum(phases.values()), draw(st.integers(0, 6))
    has_loader = draw(st.booleans())
    facts = profile(
        kind=kind,
        phases_ms=phases,
        step_ms=Spread(median=step_ms, p10=step_ms, p90=step_ms, n=20),
        device_busy_share=draw(st.floats(0.01, 1.0)),
        overhead_share=0.01,
        epoch_start_ms=draw(TIMES),
        epoch_steps=draw(st.none() | st.integers(1, 100)),
        samples_per_step=8.0,
        loaders=(loader(num_workers=workers),) if has_loader else (),
        models=(model(eval_graph_calls=draw(st.integers(0, 3))),),
        eval_share=draw(SHARES),
        rare=draw(st.none() | rare_work()),
        optimizers=(optimizer(),),
        eval_ms=0.0,
        syncs=(SyncPoint(line="a.py:1", what="item", per_step=1, ms_per_step=draw(TIMES)),),
        journey=draw(st.none() | journeys(workers if has_loader else 0)),
        pipeline=draw(st.none() | pipelines()) if has_loader else None,
        limits=Limits(
            flops_per_step=draw(st.floats(1.0, 1e13)),
            gemm_flops_per_s=draw(st.floats(1e9, 1e14)),
            gemm_dtype="float32",
            least_step_ms=draw(st.floats(1e-6, 10.0)),
        ),
        memory=draw(
            st.none() | st.just(story(kept_graph_nodes_per_step=2.0, kept_graph_names=("total",)))
        ),
        compiling=draw(st.none() | st.just(CompileFacts(seconds=20.0, most=3, recompile_s=5.0))),
        planned_steps=draw(st.none() | st.floats(1.0, 1e6)),
        ranks=draw(st.just(()) | st.just((a_rank(step_ms, draw(SHARES)),))),
        trace=draw(st.none() | st.just(a_trace(step_ms, draw(SHARES)))) if kind == "cuda" else None,
    )
    facts = replace(facts, ceilings=ceilings_of(facts))
    if draw(st.booleans()) and has_loader:
        measured = Ceilings(
            free_data=draw(RATIOS),
            free_copies=draw(RATIOS),
            compute_only=draw(RATIOS),
            is_measured=True,
            slowed_share=draw(st.floats(0.0, 0.3)) if workers else 0.0,
        )
        facts = replace(facts, ceilings=held_to_phases(facts, measured))
    return rules.add_findings(with_regime(facts), HOST)


def a_rank(step_ms, exposed):
    return RankFacts(
        rank=0,
        step_ms=step_ms,
        phases_ms=dict.fromkeys(PHASES, step_ms / len(PHASES)),
        samples_per_s=1.0,
        exposed_communication_ms=exposed * step_ms,
    )


def a_trace(step_ms, idle):
    split = IdleSplit(host_wait_share=idle, kernel_wait_share=0.0, other_share=0.0)
    return TraceSummary(steps=3, step_ms=step_ms, idle=split)


@given(profiles())
def test_no_ceiling_is_above_the_bound_of_what_it_removes(facts):
    ceilings = facts.ceilings
    of_whole = facts.step_ms.median / facts.whole_step_ms
    outside = (facts.share("h2d") + facts.share("other")) * of_whole

    assert ceilings.free_data <= most_times(data_share(facts)) * (1 + EXACT)
    assert ceilings.free_copies <= most_times(max(facts.share("h2d", "other"), 0.0)) * (1 + EXACT)
    assert ceilings.compute_only <= most_times(data_share(facts) + outside) * (1 + EXACT)


@given(profiles())
def test_what_removes_more_gains_no_less(facts):
    ceilings = facts.ceilings

    assert 1 <= ceilings.free_data <= ceilings.compute_only * (1 + EXACT)
    assert 1 <= ceilings.free_copies <= ceilings.compute_only * (1 + EXACT)


@given(profiles())
def test_the_best_case_of_data_is_no_less_than_the_ceiling_of_data(facts):
    assert facts.regime.amdahl["data_wait"] >= facts.ceilings.free_data * (1 - EXACT)
    assert best_case(facts, {"data_wait"}).ratio >= facts.ceilings.free_data * (1 - EXACT)


@given(profiles())
def test_parts_add_up_and_no_share_is_more_than_the_whole(facts):
    shares = facts.regime.shares

    assert sum(facts.phases_ms.values()) == pytest.approx(facts.step_ms.median)
    assert all(0 <= share <= 1 for share in shares.values())
    assert sum(shares.values()) <= 1 + EXACT
    assert shares[facts.regime.name] == max(shares.values())
    assert all(0 < finding.share <= 1 for finding in facts.findings)
    assert all(
        finding.of in ("step", "run", "training", "memory", "device") for finding in facts.findings
    )


@given(profiles())
def test_findings_on_different_phases_are_no_more_than_the_step(facts):
    phases = {"data_wait", "fp32_on_fast_bf16", "slow_optimizer", "other_python"}
    found = {finding.code: finding.share for finding in facts.findings}

    assert sum(found.get(code, 0.0) for code in phases) <= 1 + EXACT
    for part in ("blocked_reads", "short_of_cores"):
        assert found.get(part, 0.0) <= facts.lost_to_data + EXACT


def turns_in_test_of(module):
    """Return which way a rule's advice turns settings that others turn, too, by its sentence.

    The test module of the rule says it ("more", "fewer", "not more").
    """
    package, _, rule = module.removeprefix("flatout.").rpartition(".")
    return getattr(importlib.import_module(f"tests.{package}.test_{rule}"), "TURNS", {})


TURNS = {
    code: turns_in_test_of(module)
    for code, module in catalogue.module_names(rules).items()
    if module.startswith(rules.FAMILIES)
}
TURNED = re.compile(r"\bworkers?\b|larger batch|torch\.?_?compile|lower(?: the)? precision")


def turns_of(finding):
    """Return the settings that a finding's advice turns, each with the way."""
    name = finding.next.code.rpartition(".")[2]
    return TURNS[finding.code].get(name, {})


@given(profiles())
def test_no_two_findings_turn_a_setting_in_different_ways(facts):
    ways = {}
    for finding in facts.findings:
        for setting, way in turns_of(finding).items():
            ways.setdefault(setting, set()).add(way)
    numbers = {int(n) for each in facts.findings for n in re.findall(r"up to (\d+)", each.next)}

    for setting, told in ways.items():
        assert len(told - {"not more"}) <= 1, setting
        assert not {"more", "not more"} <= told, setting
    assert len(numbers) <= 1


def test_advice_on_a_shared_setting_says_which_way_it_turns_it():
    advice = {
        (code, name): text
        for key, text in ENGLISH.texts.items()
        for _finding, code, name in [(*key.split("."), "", "")[:3]]
        if code in TURNS and name.startswith("next")
    }
    declared = {(code, name) for code, names in TURNS.items() for name in names}
    commands = {("blocked_reads", "next_foreign")}  # the sentence of data_wait

    silent = {key for key, text in advice.items() if TURNED.search(text)} - declared
    assert silent == set()
    assert declared - commands <= set(advice)


@given(profiles())
def test_the_headline_says_what_the_findings_and_ceilings_say(facts):
    line = headline(facts)
    wait, gain = facts.share("data_wait"), facts.ceilings.free_data

    if "waits for data; at most" in line and "as well" not in line:
        assert gain == pytest.approx(most_times(wait), rel=0.06)
    if "data keeps up" in line:
        assert wait < 0.1 or facts.share("h2d") > wait
    if "of each step is spent outside model" in line:
        assert facts.share("other") > facts.share("forward", "backward", "optimizer")
    assert format_ratio(gain) in line or "waits for data" not in line


@given(profiles())
def test_nothing_but_zero_is_shown_as_zero(facts):
    told = readings(facts)
    names = [part.name for part in details(facts) if part.name in ("limits", "pipeline")]
    cells = [cell for name in names for row in section(facts, name) for cell in row]
    proofs = [finding.because for finding in facts.findings]

    for text in [*told.values(), *cells, *proofs]:
        assert not ZERO.search(text), text


@given(profiles())
def test_the_first_line_is_said_once(facts):
    text = render_profile(facts, width=2_000)

    assert text.count(text.splitlines()[0].rstrip(".")) == 1


@given(profiles())
def test_a_table_shows_no_phase_that_took_time_as_zero(facts):
    lines = render_profile(facts, width=200, details=True).splitlines()
    for phase, name in (("optimizer", "optimizer"), ("backward", "backward")):
        row = next(line for line in lines if line.startswith(f"{name} "))
        numbers = re.findall(r"(?<![<\d.])(\d+\.\d+)(?![\d])", row)
        if facts.phases_ms[phase] > 0:
            assert all(float(number) > 0 for number in numbers), row


@given(profiles(), st.sampled_from(LANGUAGES), st.booleans())
def test_every_such_report_can_be_written(facts, language, details):
    text = render_profile(facts, language=language, details=details)

    assert "inf" not in re.findall(r"\w+", text)
    assert "nan" not in re.findall(r"\w+", text)


@given(profiles(), st.sampled_from(LANGUAGES))
def test_the_short_report_fits_on_a_screen_and_names_its_first_finding(facts, language):
    text = render_profile(facts, language=language)

    assert len(text.splitlines()) <= 25
    assert [finding.code for finding in facts.findings[:1] if finding.code not in text] == []
    assert text.splitlines()[-1].endswith("flatout tune train.py")


def test_a_ceiling_is_a_number_that_was_measured_and_not_where_it_was_cut_off():
    # 99 % waits: 100x, where 50.0x was shown, the inverse of the 2 % that were taken to remain.
    facts = profile(phases_ms={"data_wait": 9900.0}, loaders=(loader(),))

    assert ceilings_of(facts).free_data == pytest.approx(100.0)
    assert best_case(facts, {"data_wait"}).ratio == pytest.approx(100.0)


def test_free_data_saves_no_more_than_the_wait_that_is_shown():
    # 89 % of the step waits, and runs with replayed batches on a drifting machine said 50x.
    facts = profile(phases_ms={"data_wait": 809.0}, loaders=(loader(),))
    measured = Ceilings(free_data=50.0, compute_only=50.0, is_measured=True)
    held = with_regime(replace(facts, ceilings=held_to_phases(facts, measured)))

    assert headline(held) == ("89 % of each step waits for data; at most 9.09x if data were free.")
    assert readings(held)["best_cases"].startswith("data wait 9.09x")
    assert ceilings(held).startswith("at most 9.09x if data were free, 9.09x")


def test_only_computing_left_is_no_less_than_the_best_case_of_the_loops_own_code():
    # An MLP whose replays were slower: 1.00x stood below "other 1.14x".
    facts = profile(phases_ms={"other": 100.0}, loaders=(loader(),))
    held = held_to_phases(facts, Ceilings(is_measured=True))

    assert held.compute_only == pytest.approx(2.0)


def test_what_workers_take_from_the_training_counts_and_is_said():
    facts = profile(phases_ms={"data_wait": 100.0}, loaders=(loader(num_workers=2),))
    measured = Ceilings(free_data=4.0, compute_only=4.0, is_measured=True, slowed_share=0.25)
    held = with_regime(replace(facts, ceilings=held_to_phases(facts, measured)))

    assert held.ceilings.free_data == pytest.approx(4.0)
    assert held.regime.amdahl["data_wait"] == pytest.approx(4.0)
    assert "the cores that they take as well" in headline(held)
    assert "workers slow the rest of the step by 25 %" in ceilings(held)


def test_a_wait_that_free_data_hardly_shortens_is_no_promise():
    facts = profile(
        kind="cuda",
        phases_ms={"data_wait": 100.0},
        loaders=(loader(),),
        ceilings=Ceilings(free_data=1.05, compute_only=2.0, is_measured=True),
    )

    assert headline(facts) == (
        "50 % of each step waits for data, yet a run with free data was only 1.05x as fast."
    )


def test_a_script_without_a_loader_is_not_told_that_its_data_keeps_up():
    facts = profile()

    assert "no DataLoader feeds it" in headline(facts)
    assert "data were free" not in ceilings(facts)


def test_copies_are_called_copies_and_are_none_on_a_cpu():
    kind = {"ceilings": Ceilings(free_data=2.0, free_copies=1.1, is_measured=True)}
    fed = {"loaders": (loader(),), "phases_ms": {"data_wait": 100.0}}

    on_gpu = section(profile(kind="cuda", **fed, **kind), "ceilings")
    on_cpu = section(profile(**fed, **kind), "ceilings")

    assert [row[0] for row in on_gpu] == [
        *("as it is", "data", "copies", "everything but computing"),
    ]
    assert "copies" not in [row[0] for row in on_cpu]


def test_a_few_operations_are_shown_in_their_own_unit():
    limits = Limits(flops_per_step=4.7e6, gemm_flops_per_s=3.9e10, gemm_dtype="float32")
    rows = section(profile(limits=limits), "limits")

    assert rows[0] == ("operations of a step", "4.70 MFLOP")
    assert rows[1] == ("matrix products (float32)", "39.0 GFLOP/s")


def test_the_loop_that_takes_most_of_the_step_is_what_bounds_it():
    facts = with_regime(profile(phases_ms={"forward": 4.0, "backward": 4.0, "other": 92.0}))

    assert facts.regime.name == "other"
    assert readings(facts)["regime"] == "other code 92 %, compute-bound 8 %"


@pytest.mark.parametrize("share", [1e-6, 0.0004, 0.5, 0.9999])
def test_a_share_that_is_nearly_nothing_or_all_is_not_said_to_be_that(share):
    assert format_share(share) not in ("0 %", "0.0 %", "100 %", "100.0 %")


def test_a_few_bytes_are_not_none():
    assert (format_bytes(22), format_bytes(300 * 1024)) == ("22 bytes", "300.0 KiB")
