import pytest
import torch

from flatout.hardware.accelerator import devices_by_torch, devices_of, trouble_with_cuda
from flatout.hardware.gpus import Driver, Gpu, read_driver
from flatout.hardware.torch_build import TorchBuild

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU that torch can use")
def test_torch_without_a_gpu_says_why():
    assert trouble_with_cuda()


@pytest.mark.gpu
def test_driver_and_torch_agree_on_the_gpus():
    by_torch = devices_by_torch(read_driver())

    assert [device.name for device in by_torch] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
