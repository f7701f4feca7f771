"""The rules on profiles that were measured on an H200: the records of 2026-11-26."""

import json
from dataclasses import replace

from flatout.records.machine import Device
from flatout.records.profile import profile_from_json
from flatout.rules import add_findings
from tests.paths import ROOT
from tests.techniques.facts import machine

RECORDS = ROOT / "benchmarks/records"
H200 = Device(kind="cuda", name="NVIDIA H200", memory_bytes=150 * 10**9, compute_capability=(9, 0))


GPT2 = ("compute", "ladder gpt2")
RESNET = ("small", "ladder cifar")


def recorded(name, what, of):
    path = RECORDS / f"2026-11-26_gpu_{name}_1xnvidia-h200/result.json"
    ablation = json.loads(path.read_text())["raw"][what]["result"]["ablation"]
    return replace(profile_from_json(ablation[of]["profile"]), findings=())


def codes(profile):
    return {each.code for each in add_findings(profile, machine(device=H200)).findings}


def test_a_naive_gpt2_computes_in_full_fp32():
    assert codes(recorded(*GPT2, "baseline")) == {"fp32_on_fast_bf16", "tf32_off"}


def test_nothing_is_said_of_it_once_it_is_tuned():
    assert codes(recorded(*GPT2, "best")) == set()


def test_a_resnet_in_fp32_uses_tf32_and_changes_layouts():
    found = recorded(*RESNET, "baseline")
    # Summarised before the names of cuDNN's convolutions on tensor cores were known.
    trace = replace(found.trace, tensor_core_share=found.trace.product_share)

    assert codes(replace(found, trace=trace)) == {"fp32_on_fast_bf16", "channels_first"}
