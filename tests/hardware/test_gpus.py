import sys
from types import SimpleNamespace

import pytest

from flatout.hardware.gpus import Gpu, pci_gpus, read_driver, visible


class Failure(Exception):  # noqa: N818  stands for NVMLError
    pass


def fail_with(text):
    def raise_it(*_):
        raise Failure(text)

    return raise_it


def memory_info(total, used, reserved=4):
    """Return NVML's answer: the first version of it counts the reserved part among the used."""

    def answer(_handle, version=None):
        if version is None:
            return SimpleNamespace(total=total + reserved, used=used + reserved)
        return SimpleNamespace(total=total + reserved, used=used, reserved=reserved)

    return answer


def nvml(**changes):
    """Return a driver library with two GPUs, the second of which tells little."""

    def handle_only(handle):
        if handle:
            raise Failure("Not Supported")

    parts = {
        "NVMLError": Failure,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"570.12",
        "nvmlSystemGetCudaDriverVersion": lambda: 12080,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}abc",
        "nvmlMemory_v2": 2,
        "nvmlDeviceGetMemoryInfo": memory_info(100, 7),
        "nvmlDeviceGetUtilizationRates": lambda h: handle_only(h) or SimpleNamespace(gpu=35),
        "nvmlDeviceGetComputeRunningProcesses": lambda h: (
            handle_only(h) or [SimpleNamespace(pid=4321)]
        ),
        "nvmlDeviceGetCudaComputeCapability": lambda h: handle_only(h) or (9, 0),
        "nvmlDeviceGetMigMode": fail_with("Not Supported"),
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": fail_with("Not Found"),
    }
    return SimpleNamespace(**parts | changes)


def test_the_driver_and_its_gpus_are_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())

    driver = read_driver()

    assert (driver.version, driver.cuda) == ("570.12", "12.8")
    first = driver.gpus[0]
    assert (first.name, first.memory_bytes, first.used_bytes) == ("NVIDIA H200", 100, 7)
    assert (first.busy_share, first.pids, first.compute_capability) == (0.35, (4321,), (9, 0))


def test_a_driver_without_the_second_answer_gives_the_first(monkeypatch):
    def told(_handle, version=None):
        if version is not None:
            raise Failure("Function Not Found")
        return SimpleNamespace(total=100, used=7)

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetMemoryInfo=told))

    first = read_driver().gpus[0]

    assert (first.memory_bytes, first.used_bytes) == (100, 7)


def test_what_a_gpu_does_not_tell_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())

    second = read_driver().gpus[1]

    assert (second.busy_share, second.pids, second.compute_capability) == (None, (), None)


def test_a_whole_gpu_that_keeps_its_memory_to_itself_hides_no_other(monkeypatch):
    def told(handle, version=None):
        if handle == 0:
            raise Failure("Insufficient Permissions")
        return memory_info(100, 7)(handle, version)

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetMemoryInfo=told))

    driver = read_driver()

    assert driver.version
    assert [(gpu.memory_bytes, gpu.used_bytes) for gpu in driver.gpus] == [(0, 0), (100, 7)]


def test_a_missing_driver_gives_its_reason(monkeypatch):
    fail = fail_with("NVML Shared Library Not Found")
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=fail))

    driver = read_driver()

    assert driver.gpus == ()
    assert driver.trouble == "NVML Shared Library Not Found"


def test_this_host_answers_with_gpus_or_with_a_reason():
    driver = read_driver()

    assert driver.gpus or driver.trouble


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("0", [0]),
        ("1,0", [1, 0]),
        ("GPU-1", [1]),
        ("0,9,1", [0]),
        ("-1", []),
        ("", []),
        ("MIG-1234", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(text, indices):
    gpus = [Gpu(index=i, kind="cuda", name="A", uuid=f"GPU-{i}f") for i in range(2)]

    assert [gpu.index for gpu in visible(gpus, {"CUDA_VISIBLE_DEVICES": text})] == indices


def test_without_the_variable_all_gpus_are_visible():
    gpus = [Gpu(index=i, kind="cuda", name="A") for i in range(2)]

    assert visible(gpus, {}) == tuple(gpus)


def split_gpu(monkeypatch):
    """Put a driver in place whose first GPU is split into two parts of seven."""

    def part(_handle, number):
        if number not in (1, 4):
            raise Failure("Not Found")
        return f"part{number}"

    names = {"part1": "MIG-11aa", "part4": "MIG-44dd"}
    fake = nvml(
        nvmlDeviceGetMigMode=lambda handle: [int(handle == 0), 0],
        nvmlDeviceGetMigDeviceHandleByIndex=part,
        nvmlDeviceGetUUID=lambda handle: names.get(handle, f"GPU-{handle}abc"),
        nvmlDeviceGetMemoryInfo=lambda handle, version=None: memory_info(
            20 if handle in names else 100, 1
        )(handle, version),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)


@pytest.mark.parametrize(
    ("variables", "uuids"),
    [
        ({}, ["MIG-11aa"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-44dd"}, ["MIG-44dd"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["MIG-11aa"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-1abc"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-99"}, []),
    ],
)
def test_of_a_split_gpu_a_process_sees_one_part_with_its_own_memory(monkeypatch, variables, uuids):
    split_gpu(monkeypatch)

    seen = visible(read_driver().gpus, variables)

    assert [gpu.uuid for gpu in seen] == uuids
    assert [gpu.memory_bytes for gpu in seen] == [100 if u[0] == "G" else 20 for u in uuids]


def test_a_part_that_keeps_its_memory_to_itself_is_no_part_of_ours(monkeypatch):
    split_gpu(monkeypatch)
    library = sys.modules["pynvml"]
    told = library.nvmlDeviceGetMemoryInfo
    monkeypatch.setattr(
        library,
        "nvmlDeviceGetMemoryInfo",
        lambda handle, *more: fail_with("No")() if handle == "part1" else told(handle, *more),
    )

    assert [gpu.uuid for gpu in visible(read_driver().gpus, {})] == ["MIG-44dd"]


def test_without_the_bindings_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert "pip install nvidia-ml-py" in read_driver().trouble


def test_compute_gpus_in_the_slots_are_counted_and_display_cards_are_not(tmp_path):
    cards = {"0": ("0x10de", "0x030200"), "1": ("0x10de", "0x030000"), "2": ("0x8086", "0x120000")}
    for slot, (vendor, kind) in cards.items():
        folder = tmp_path / "sys/bus/pci/devices" / slot
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")

    assert pci_gpus(tmp_path) == 1
