from flatout.records.machine import Device
from flatout.workflow.doctor import busy_gpus, driver_fits, training_device
from tests.techniques.facts import machine as a_machine

CPU = Device(kind="cpu", name="Some CPU", memory_bytes=1)
H200 = Device(kind="cuda", name="NVIDIA H200", memory_bytes=140 * 1024**3)


def machine(*, devices=(), torch_version="2.13.0", features=frozenset(), **facts):
    return a_machine(
        device=devices[0] if devices else CPU,
        devices=tuple(devices),
        torch_version=torch_version,
        cpu_features=features,
        facts=facts,
    )


def gpu(**changes):
    idle = {"index": 0, "name": "NVIDIA H200", "memory_bytes": 1000, "used_bytes": 5}
    return idle | {"busy_share": 0.0, "pids": []} | changes


def test_a_machine_without_a_gpu_is_fine_and_says_where_training_runs():
    check = training_device(machine(features=frozenset({"amx_bf16"})))

    assert check.status == "ok"
    assert "CPU" in check.what
    assert "multiplies bf16 in hardware" in check.what


def test_a_build_for_cuda_without_a_driver_is_named_beside_the_cpu():
    check = training_device(machine(torch_cuda="13.0", driver_trouble="NVML not found"))

    assert check.status == "ok"
    assert "no driver for this torch, built for CUDA 13.0" in check.what


def test_a_gpu_that_torch_uses_is_fine():
    check = training_device(machine(devices=[H200], gpus=[gpu()]))

    assert check.status == "ok"
    assert "NVIDIA H200" in check.what


def test_several_gpus_are_not_said_to_be_used_by_every_script():
    check = training_device(machine(devices=[H200] * 4, gpus=[gpu()] * 4))

    assert check.what.startswith("torch finds 4 x NVIDIA H200")
    assert "trains on one of them" in check.why
    assert "flatout run --gpus 4" in check.next


def test_a_cpu_build_on_a_gpu_machine_is_named_as_the_cause():
    found = machine(torch_version="2.13.0+cpu", gpus=[gpu()], torch_cuda=None, torch_hip=None)

    check = training_device(found)

    assert check.status == "bad"
    assert "2.13.0+cpu is a build for the CPU only" in check.what
    assert "lands on the CPU" in check.why


def test_an_empty_list_of_visible_devices_is_named_as_the_cause():
    variables = {"CUDA_VISIBLE_DEVICES": ""}

    check = training_device(machine(gpus=[gpu()], torch_cuda="12.8", variables=variables))

    assert check.status == "bad"
    assert "CUDA_VISIBLE_DEVICES=''" in check.what
    assert check.next == "unset CUDA_VISIBLE_DEVICES"


def test_a_list_that_names_no_gpu_is_named_as_the_cause():
    variables = {"CUDA_VISIBLE_DEVICES": "7"}

    check = training_device(machine(gpus=[gpu()], torch_cuda="12.8", variables=variables))

    assert check.status == "bad"
    assert "CUDA_VISIBLE_DEVICES='7'" in check.what


def test_a_driver_that_is_too_old_comes_before_a_list_of_gpus():
    found = machine(
        gpus=[gpu()],
        torch_cuda="13.0",
        driver_cuda="12.8",
        variables={"CUDA_VISIBLE_DEVICES": "0"},
    )

    assert "its driver is too old for this torch" in training_device(found).what


def test_what_torch_says_is_passed_on():
    check = training_device(machine(gpus=[gpu()], torch_cuda="12.8", torch_trouble="error 803"))

    assert check.status == "bad"
    assert "error 803" in check.what


def test_a_gpu_without_a_driver_is_named_as_the_cause():
    check = training_device(machine(pci_gpus=1, driver_trouble="Driver Not Loaded"))

    assert check.status == "bad"
    assert "Driver Not Loaded" in check.what


def test_unlike_gpus_are_pointed_out_while_their_order_is_cuda_s():
    small = Device(kind="cuda", name="NVIDIA T4", memory_bytes=1)

    check = training_device(machine(devices=[H200, small]))

    assert check.status == "warn"
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in check.next


def test_a_driver_that_is_new_enough_is_fine():
    assert driver_fits(machine(torch_cuda="12.8", driver_cuda="13.0")).status == "ok"


def test_a_driver_of_the_same_major_version_is_a_risk():
    assert driver_fits(machine(torch_cuda="12.10", driver_cuda="12.4")).status == "warn"


def test_a_driver_of_an_older_major_version_is_bad():
    assert driver_fits(machine(torch_cuda="13.0", driver_cuda="12.9")).status == "bad"


def test_nothing_is_said_about_a_driver_that_is_not_there():
    assert driver_fits(machine(torch_cuda=None, driver_cuda="")) is None


def test_an_idle_gpu_is_fine():
    assert busy_gpus(machine(gpus=[gpu()])).status == "ok"


def test_a_gpu_in_use_is_reported_with_its_process():
    check = busy_gpus(machine(gpus=[gpu(pids=[4321], used_bytes=500, busy_share=0.9)]))

    assert check.status == "warn"
    assert "90 % busy" in check.what
    assert "4321" in check.what


def test_memory_that_nobody_owns_up_to_counts_as_use():
    assert busy_gpus(machine(gpus=[gpu(used_bytes=300, busy_share=None)])).status == "warn"
