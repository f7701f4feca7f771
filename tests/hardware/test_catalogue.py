import pytest

from flatout.hardware.catalogue import CATALOGUE, find_gpu, model_of
from flatout.records.errors import UserError
from flatout.records.machine import Device
from flatout.records.units import GIB, MIB

ASKED = ("h200", "h100", "h100-pcie", "h100-nvl", "a100-80", "a100-40", "l40s", "l4", "a10g", "t4")
ASKED += ("rtx4090", "rtx3090")


def test_every_gpu_that_a_plan_may_name_is_there():
    assert set(CATALOGUE) == {*ASKED, "mi300x"}
    for model in CATALOGUE.values():
        assert 10 * GIB < model.memory_bytes < 200 * GIB
        assert model.bf16_flops >= model.fp32_flops > 1e12
        assert model.bandwidth > model.host_bandwidth > 1e9


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * GIB), ("1500 MiB", 1500 * MIB), ("24gb", 24 * 10**9), ("8589934592", 8 * GIB)],
)
def test_a_size_is_a_gpu_of_unknown_make(text, size):
    found = find_gpu(text)

    assert found.memory_bytes == size
    assert found.name == "unnamed"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rtx4080", "did you mean 'rtx4090'"),
        ("a100", "give one of: a100-80, a100-40"),
        ("banana", "known are"),
        ("16", "16 bytes is none"),
        ("", "unknown GPU"),
    ],
)
def test_what_is_no_gpu_is_refused_with_the_nearest_name(text, says):
    with pytest.raises(UserError, match=says):
        find_gpu(text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "unnamed"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce GTX 1080", "unnamed"),
    ],
)
def test_a_device_that_is_there_is_found_by_its_name_and_keeps_its_memory(name, expected):
    found = model_of(Device(kind="cuda", name=name, memory_bytes=7 * GIB))

    assert (found.name, found.full_name, found.memory_bytes) == (expected, name, 7 * GIB)
