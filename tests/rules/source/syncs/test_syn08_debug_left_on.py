import pytest

from tests.rules.source.scenario import codes_in, fixed

SAME_LOSSES = ("losses, total", "torch.autograd.set_detect_anomaly(True)\nlosses, total")
TRAIN = """
import torch
{line}
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""


def test_anomaly_detection_is_found_and_taken_out():
    text = "import torch\ntorch.autograd.set_detect_anomaly(True)\nmain()\n"

    assert codes_in(text) == {"SYN08": [2]}
    assert fixed(text, "SYN08") == "import torch\nmain()\n"


@pytest.mark.parametrize(
    "line",
    [
        "with torch.autograd.detect_anomaly():",
        "with torch.profiler.profile() as p:",
        "with torch.autograd.profiler.profile(True, use_device='cuda'):",
    ],
)
def test_a_mode_around_the_training_is_found(line):
    found = codes_in(TRAIN.format(line=line))

    assert found == ({} if "(True," in line else {"SYN08": [3]})


@pytest.mark.parametrize(
    "line",
    [
        "with torch.profiler.profile(schedule=plan) as p:",
        "with torch.autograd.profiler.emit_nvtx(args.nvtx):",
        "with torch.autograd.set_detect_anomaly(args.debug):",
        "with torch.autograd.set_detect_anomaly(False):",
    ],
)
def test_modes_with_an_end_or_a_flag_are_left_alone(line):
    assert codes_in(TRAIN.format(line=line)) == {}
