from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flatout.hardware.accelerator import (
    TorchBuild,
    cuda_devices,
    devices_by_torch,
    devices_of,
    trouble_with_cuda,
)
from flatout.hardware.gpus import Driver, Gpu, read_driver

H200 = Gpu(
    index=0,
    kind="cuda",
    name="NVIDIA H200",
    uuid="GPU-a",
    memory_bytes=10,
    compute_capability=(9, 0),
)


def test_a_cpu_build_finds_no_device_beside_a_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert devices_of(Driver(gpus=(H200,)), TorchBuild(version="2.13.0+cpu")) == ()


def test_a_cuda_build_finds_the_gpu_with_its_facts(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    (device,) = devices_of(Driver(gpus=(H200,)), TorchBuild(version="2.13.0", cuda="12.8"))

    assert (device.kind, device.name, device.memory_bytes) == ("cuda", "NVIDIA H200", 10)
    assert device.compute_capability == (9, 0)


def test_a_rocm_build_does_not_take_an_nvidia_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert devices_of(Driver(gpus=(H200,)), TorchBuild(version="2.13.0", hip="6.4")) == ()


def test_hidden_gpus_are_no_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert devices_of(Driver(gpus=(H200,)), TorchBuild(version="2.13.0", cuda="12.8")) == ()


def torch_with(count, *, hip=None):
    """Return the part of torch that tells about GPUs, for a machine that has some."""
    facts = SimpleNamespace(name="Some GPU", total_memory=5, major=8, minor=0)
    cuda = SimpleNamespace(device_count=lambda: count, get_device_properties=lambda index: facts)
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip))


def test_where_driver_and_torch_count_alike_the_driver_is_believed():
    (device,) = cuda_devices(torch_with(1), [H200])

    assert device.name == "NVIDIA H200"


def test_where_the_driver_counts_otherwise_torch_is_believed():
    devices = cuda_devices(torch_with(2), [H200])

    assert [device.name for device in devices] == ["Some GPU", "Some GPU"]
    assert devices[0].compute_capability == (8, 0)


def test_where_the_driver_tells_no_memory_torch_is_believed():
    (device,) = cuda_devices(torch_with(1), [replace(H200, memory_bytes=0)])

    assert device.memory_bytes == 5


def test_a_gpu_of_amd_has_no_cuda_capability():
    (device,) = cuda_devices(torch_with(1, hip="6.4"), [])

    assert (device.kind, device.compute_capability) == ("rocm", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU that torch can use")
def test_torch_without_a_gpu_says_why():
    assert trouble_with_cuda()


@pytest.mark.gpu
def test_driver_and_torch_agree_on_the_gpus():
    by_torch = devices_by_torch(read_driver())

    assert [device.name for device in by_torch] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
