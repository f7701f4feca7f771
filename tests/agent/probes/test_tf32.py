"""Which products are counted as TF32: both families of torch's switches are understood."""

import ast
import subprocess
import sys

import pytest
import torch

NEW = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="a torch without them"
)
ASK = """
from types import SimpleNamespace
from flatout.agent.probes.flops import Flops
probe = Flops(SimpleNamespace(quietly=lambda function: function))
probe._ask_tf32()
print(probe.tf32)
"""


def asked(switches=""):
    """Ask in a process of its own: the newer switches cannot be put back as they were."""
    code = f"import torch\n{switches}\n{ASK}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout)


@pytest.mark.parametrize(
    ("switches", "found"),
    [
        ("", {"convolution": True, "product": False}),
        (
            "torch.set_float32_matmul_precision('high'); torch.backends.cudnn.allow_tf32 = False",
            {"convolution": False, "product": True},
        ),
    ],
)
def test_the_older_switches_are_seen(switches, found):
    assert asked(switches) == found


@NEW
def test_the_newer_switches_are_seen_where_the_older_ones_raise():
    switches = """
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.cudnn.conv.fp32_precision = "ieee"
"""

    assert asked(switches) == {"convolution": False, "product": True}
