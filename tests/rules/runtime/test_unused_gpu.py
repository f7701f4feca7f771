import pytest

from flatout.rules.runtime.unused_gpu import check
from tests.techniques.facts import gpu, machine, profile


def test_a_model_on_the_cpu_beside_a_gpu_is_reported_with_what_it_computes():
    finding = check(profile(phases_ms={"data_wait": 25.0}), machine(devices=(gpu(),)))

    assert finding.share == 0.8
    assert finding.is_bound
    assert finding.because == (
        "100 ms of 125 ms (80 %, n=20) are computed on the CPU, and a GPU is not used"
    )
    assert '.to("cuda")' in finding.next


@pytest.mark.parametrize(("kind", "name"), [("rocm", "cuda"), ("mps", "mps")])
def test_a_device_is_called_as_torch_calls_it(kind, name):
    finding = check(profile(), machine(devices=(gpu(kind=kind),)))

    assert f'.to("{name}")' in finding.next


@pytest.mark.parametrize(
    ("facts", "host"),
    [
        (profile(), machine()),
        (profile(kind="cuda"), machine(devices=(gpu(),))),
        (profile(phases_ms={"data_wait": 900.0}), machine(devices=(gpu(),))),
        (profile(phases_ms={"forward": 5.0, "backward": 10.0}), machine(devices=(gpu(),))),
    ],
    ids=["no GPU", "on the GPU", "waits for data", "a small model"],
)
def test_it_is_silent_where_a_gpu_could_not_help(facts, host):
    assert check(facts, host) is None
