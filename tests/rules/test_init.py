import importlib
import re
from dataclasses import replace

import pytest

from flatout import rules
from flatout.records import catalogue
from flatout.records.catalogue import module_names
from flatout.records.memory import TensorAtPeak
from flatout.records.profile import RareWork, Regime
from flatout.records.readings import CompileFacts, GpuReadings, Limits
from flatout.records.units import GIB, MIB
from flatout.rules.runtime import data_wait
from tests.paths import ROOT
from tests.rules.journey_facts import journey
from tests.rules.memory_facts import story, sync
from tests.rules.pipeline_facts import pipeline
from tests.rules.rank_facts import rank
from tests.support.programs import python
from tests.techniques.facts import gpu, loader, machine, model, optimizer, profile

EVERYTHING = profile(
    phases_ms={"data_wait": 50.0, "optimizer": 30.0, "other": 20.0},
    eval_ms=10.0,
    eval_share=0.5,
    rare=RareWork(share=0.4, ms=90.0, steps=4, of_steps=20, saving_share=0.0),
    limits=Limits(least_step_ms=190.0, gemm_dtype="float32"),
    gpu=GpuReadings(
        other_processes=1,
        clock_mhz=900.0,
        max_clock_mhz=1000.0,
        throttle_shares={"power brake": 0.5},
    ),
    loaders=(
        loader(
            pad_share=0.5,
            num_workers=2,
            sampler="DistributedSampler",
            epoch_samples=((9, 3, 8, 1),) * 2,
        ),
    ),
    epoch_start_ms=900.0,
    epoch_steps=10,
    compiling=CompileFacts(seconds=60.0, recompiles=4, recompile_s=9.0, most=4, place="m.py:3"),
    planned_steps=10.0,
    models=(
        model(attention_backend="math", widest_output=50_257),
        model(name="DistributedDataParallel", finds_unused=True, unused_bytes=0),
        model(name="DataParallel", experts=8, expert_parameters=800, eval_graph_calls=4),
    ),
    optimizers=(optimizer(),),
    memory=story(
        peak_bytes=8 * GIB,
        peak_phase="optimizer",
        by_phase={"backward": 4 * GIB, "optimizer": 8 * GIB},
        largest=(
            TensorAtPeak(
                bytes=4 * GIB, shape=(9, 50_257), dtype="float32", line="", phase="forward"
            ),
        ),
        leak_bytes_per_step=10 * MIB,
        kept_graph_nodes_per_step=100.0,
        kept_graph_names=("total",),
        reserved_bytes=15 * GIB,
        fragmentation_share=0.5,
    ),
    syncs=(sync(),),
    journey=journey(growth=10.0 * MIB),
    pipeline=replace(pipeline(), slow_samples=1, slow_share=0.5),
    ranks=(
        rank(0, exposed_ms=60.0, first_batch="a"),
        rank(1, exposed_ms=30.0, is_straggler=True, first_batch="a"),
    ),
)
ON_GPU = profile(
    kind="cuda",
    phases_ms={"h2d": 50.0},
    loaders=(loader(),),
    models=(model(conv_weights=9, used_autocast=True),),
    regime=Regime(name="launch", shares={"launch": 0.5}),
    ranks=(rank(0, device="GPU-1"), rank(1, device="GPU-1")),
)
IN_FP32 = profile(kind="cuda", models=(model(),), environment={"fp32_matmul": "highest"})
FAST = machine(cpu_features=frozenset({"amx_bf16"}), devices=(gpu(), gpu()))
AMPERE = machine(device=gpu((8, 0)))
CONTAINER = machine(
    shm_free_bytes=64 * MIB, facts={"quota_cores": 2.0, "affinity_cores": 8, "pci_gpus": 1}
)
IN_CONTAINER = profile(
    phases_ms={"data_wait": 90.0}, loaders=(loader(batch_bytes=GIB),), pipeline=pipeline()
)


def codes_of(known, in_use=(), where=FAST):
    return {finding.code for finding in rules.add_findings(known, where, in_use).findings}


def codes_of_own_test(code):
    """Return what is found in the profile that a rule's own test module calls SPEAKS, if any."""
    _flatout, *folders, rule = module_names(rules)[code].split(".")
    test = importlib.import_module(".".join(["tests", *folders, f"test_{rule}"]))
    return codes_of(test.SPEAKS, where=machine()) if hasattr(test, "SPEAKS") else set()


def test_every_rule_names_itself_and_the_largest_share_comes_first():
    found = rules.add_findings(EVERYTHING, FAST).findings

    elsewhere = codes_of(IN_FP32, where=AMPERE) | codes_of(IN_CONTAINER, where=CONTAINER)
    spoken = codes_of(EVERYTHING) | codes_of(ON_GPU) | elsewhere
    silent = set(rules.codes()) - spoken
    assert [code for code in silent if code not in codes_of_own_test(code)] == []
    shares = [finding.share for finding in found if not finding.is_bound]
    assert shares == sorted(shares, reverse=True)
    assert all(0 < finding.share <= 1 for finding in found)
    assert all(finding.evidence and finding.next for finding in found)


def test_what_is_only_known_to_be_no_more_comes_after_all_others():
    found = rules.add_findings(EVERYTHING, FAST).findings

    is_bound = [finding.is_bound for finding in found]
    assert is_bound == sorted(is_bound)
    assert {finding.code for finding in found if finding.is_bound} == {
        *("math_attention", "expert_loop", "unused_gpu", "padding_waste", "evaluation_graph"),
        *("shared_gpu", "lowered_clocks", "at_ceiling", "data_parallel"),
        *("same_data", "same_order", "unused_search", "recompiles", "fp32_on_fast_bf16"),
    }


def test_a_training_that_only_computes_has_no_findings():
    judged = rules.add_findings(profile(models=(model(),)), machine())

    assert judged.findings == ()
    assert judged.notes == ()


def test_a_rule_that_fails_is_left_out_with_a_note_and_the_others_speak(monkeypatch):
    def fail(profile, machine):
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(data_wait, "check", fail)
    noted = profile(phases_ms={"data_wait": 50.0, "other": 50.0}, notes=("as before",))

    judged = rules.add_findings(noted, machine())

    assert [finding.code for finding in judged.findings] == ["other_python"]
    assert judged.notes == (
        "as before",
        "rule data_wait failed: ZeroDivisionError: float division by zero",
    )


@pytest.mark.parametrize(
    ("code", "technique"),
    [
        ("fp32_on_fast_bf16", "bf16_autocast"),
        ("slow_optimizer", "fused_optimizer"),
        ("fragmented_memory", "expandable_segments"),
    ],
)
def test_a_technique_that_is_in_use_is_not_advised(code, technique):
    assert codes_of(EVERYTHING, {technique}) == codes_of(EVERYTHING) - {code}


def test_what_mends_a_bottleneck_is_a_technique():
    named = {
        technique
        for module in module_names(rules).values()
        for technique in getattr(importlib.import_module(module), "MENDED_BY", ())
    }

    assert named
    assert named <= set(catalogue.names())


def test_the_catalogue_names_only_techniques_that_there_are():
    page = (ROOT / "docs/rules/README.md").read_text()

    techniques = re.findall(r"techniques? ((?:`\w+`(?:, )?)+)", page)
    named = {name for text in techniques for name in re.findall(r"`(\w+)`", text)}
    assert len(named) > 20
    assert named <= set(catalogue.names())


def test_the_rules_do_not_import_torch():
    code = (
        "import sys; from flatout import rules\n"
        "from flatout.records.catalogue import module_names\n"
        "[__import__(module) for module in module_names(rules).values()]\n"
        "print(len(rules.codes()), 'torch' in sys.modules)"
    )

    done = python(["-c", code], check=True)

    assert done.stdout.split()[1] == "False"
