from dataclasses import replace

import pytest

from flatout.rules.device.unseen_gpu import check
from tests.techniques.facts import gpu, machine, profile

GPU = {"index": 0, "name": "a GPU"}
BUILT = {"gpus": [GPU], "torch_cuda": "13.0", "driver_cuda": "13.1", "pci_gpus": 1}


def on(**facts):
    return replace(machine(facts=BUILT | facts), torch_version="2.13.0")


@pytest.mark.parametrize(
    ("host", "because", "advice"),
    [
        (
            on(gpus=[], driver_trouble="no libcuda"),
            "1 GPU in a slot, and no driver for it (no libcuda)",
            "install or load the GPU's driver",
        ),
        (
            on(variables={"CUDA_VISIBLE_DEVICES": ""}),
            "1 GPU here, hidden by CUDA_VISIBLE_DEVICES=''",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            on(variables={"CUDA_VISIBLE_DEVICES": "7"}),
            "1 GPU here, hidden by CUDA_VISIBLE_DEVICES='7'",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            on(torch_cuda=None),
            "1 GPU here, but torch 2.13.0 is a build for the CPU only",
            "pip uninstall torch",
        ),
        (
            on(driver_cuda="12.8", variables={"CUDA_VISIBLE_DEVICES": "0"}),
            "1 GPU here, but the driver runs CUDA up to 12.8, and torch was built with 13.0",
            "update the GPU driver",
        ),
        (
            on(torch_trouble="CUDA unknown error"),
            "1 GPU here, but torch cannot use it (CUDA unknown error)",
            "torch.cuda.init()",
        ),
    ],
    ids=["driver", "hidden", "not named", "build", "old driver", "trouble"],
)
def test_the_exact_cause_is_named(host, because, advice):
    finding = check(profile(), host)

    assert finding.because == f"100 ms of 100 ms (100 %) are computed on the CPU: {because}"
    assert finding.next.startswith(advice) or advice in finding.next


@pytest.mark.parametrize(
    ("facts", "host"),
    [
        (profile(), machine()),
        (profile(), on(gpus=[], pci_gpus=0)),
        (profile(), replace(on(), devices=(gpu(),))),
        (profile(kind="cuda"), on(torch_cuda=None)),
        (profile(phases_ms={"data_wait": 900.0}), on(torch_cuda=None)),
        (profile(phases_ms={"forward": 1.0, "backward": 2.0}), on(torch_cuda=None)),
    ],
    ids=["no GPU", "none in a slot", "torch sees it", "on the GPU", "waits", "small"],
)
def test_it_is_silent_without_a_gpu_and_where_one_is_used_or_would_not_help(facts, host):
    assert check(facts, host) is None
