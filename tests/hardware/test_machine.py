import json
import sys

import torch

from flatout.hardware import machine
from flatout.hardware.accelerator import TorchBuild
from flatout.hardware.machine import read_machine
from flatout.records.json_records import to_plain
from flatout.records.machine import Device
from tests.support.programs import python


def test_the_quick_reading_imports_no_torch():
    code = (
        "import sys; from flatout.hardware.machine import read_machine; "
        "read_machine(torch=False); print('torch' in sys.modules)"
    )

    done = python(["-c", code], check=True)

    assert done.stdout.strip() == "False"


def test_the_quick_reading_agrees_with_torch_about_the_devices():
    quick, asked = read_machine(torch=False), read_machine()

    assert quick.devices == asked.devices
    assert quick.device == asked.device
    assert quick.torch_version == asked.torch_version == torch.__version__


def test_cores_and_memory_are_within_the_host():
    found = read_machine(torch=False)

    assert 1 <= found.physical_cores <= found.usable_cores <= found.logical_cores
    assert found.memory_bytes > 0


def test_the_record_is_plain_json():
    plain = to_plain(read_machine(torch=False))

    assert json.loads(json.dumps(plain))["facts"]["python"] == sys.version.split()[0]


def test_set_variables_are_recorded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    assert read_machine(torch=False).facts["variables"]["OMP_NUM_THREADS"] == "3"


def test_a_torch_for_amd_is_asked_itself(monkeypatch):
    gpu = Device(kind="rocm", name="AMD Instinct MI300X", memory_bytes=7)
    monkeypatch.setattr(machine, "torch_build", lambda: TorchBuild(version="2.13", hip="6.4"))
    monkeypatch.setattr(machine, "devices_by_torch", lambda _driver: (gpu,))

    assert read_machine(torch=False).device == gpu
