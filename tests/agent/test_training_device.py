"""Which device a training runs on, beside a process whose current device is another one."""

from types import SimpleNamespace

import pytest
import torch

from flatout.agent import training_device
from flatout.agent.recorder import device_seen
from flatout.agent.session import Session
from flatout.agent.training_device import batch_device, find_cuda_device, follow
from flatout.records.profile import PeakBytes
from flatout.records.trial_spec import TrialSpec


def on(*names):
    return [SimpleNamespace(device=torch.device(name)) for name in names]


def root(*names):
    return SimpleNamespace(parameters=lambda: iter(on(*names)))


class Stepper:
    """Stands for an optimizer."""

    def __init__(self, *names):
        self.param_groups = [{"params": []}, {"params": on(*names)}]


def session_with(*roots, optimizers=()):
    session = Session(TrialSpec())
    for each in roots:
        session.add_root(each)
    for each in optimizers:
        session.add_optimizer(each)
    session.holds = optimizers  # it does so by weak reference
    return session


@pytest.fixture
def driver(monkeypatch):
    """A machine with GPUs, of which the process's current one is the first."""
    held = {}
    monkeypatch.setattr(training_device, "_followed", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held.get(device, 0))
    return held


def test_the_device_of_the_first_root_counts_and_not_the_current_one(driver):
    session = session_with(root("cuda:1", "cuda:2"), optimizers=[Stepper("cuda:3")])
    follow(session)

    assert batch_device() == torch.device("cuda:1")
    assert find_cuda_device(session) == torch.device("cuda:1")


def test_before_a_model_is_called_its_optimizer_tells(driver):
    session = session_with(optimizers=[Stepper("meta", "cuda:1")])
    follow(session)

    assert find_cuda_device(session) == torch.device("cuda:1")
    assert batch_device() == torch.device("cuda:1")


def test_while_nothing_is_known_the_current_device_stands_in(driver, monkeypatch):
    session = session_with()
    follow(session)

    assert find_cuda_device(session) == torch.device("cuda:0")
    assert batch_device() == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert batch_device() == torch.device("cpu")


def test_a_training_on_the_cpu_stays_there_though_a_gpu_is_in_sight(driver):
    session = session_with(root("cpu"))
    follow(session)

    assert batch_device() == torch.device("cpu")
    assert find_cuda_device(session) is None


def test_parameters_that_wait_on_the_host_do_not_hide_the_device_that_computes(driver):
    session = session_with(root("cpu"))
    driver[torch.device("cuda:0")] = 100

    assert find_cuda_device(session) == torch.device("cuda:0")
    session.add_root(root("cpu", "cuda:1"))
    assert find_cuda_device(session) == torch.device("cuda:1")


def test_a_driver_that_sleeps_is_not_woken(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", None)

    assert find_cuda_device(session_with(root("cpu"))) is None
    assert find_cuda_device(session_with()) is None


def test_a_session_that_is_over_is_not_asked(driver, monkeypatch):
    monkeypatch.setattr(training_device, "_followed", [lambda: None])

    assert batch_device() == torch.device("cuda:0")


def test_of_several_devices_the_peak_is_that_of_the_fullest(driver, monkeypatch):
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    driver |= {first: 100, second: 300}
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", {first: 200, second: 400}.get)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {second: (500, 1_000)}.get)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a"))
    session = session_with(root("cuda:0"), root("cuda:1"))

    seen = device_seen(session)

    assert (seen.count, seen.name) == (2, "cuda:0")
    assert seen.peak == PeakBytes(allocated=300, reserved=400, device=500)
