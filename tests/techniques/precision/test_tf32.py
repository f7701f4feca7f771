import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.techniques.precision.tf32 import Tf32
from tests.support.programs import python
from tests.techniques.facts import CPU, gpu, machine, model, profile

PROMISE = "acts on a CUDA device only: products in TF32"

NEWER = hasattr(torch.backends.cuda.matmul, "fp32_precision")


def run(code):
    """Run code in a process of its own: these switches belong to the whole process."""
    head = "import torch; from flatout.techniques.precision.tf32 import allow_tf32, allows\n"
    done = python(["-c", head + code], check=True)
    return done.stdout.split()


def test_it_is_off_until_it_is_allowed_and_can_be_read_afterwards():
    found = run(
        "print(allows('cuda', 'matmul')); allow_tf32(); print(allows('cuda', 'matmul'));"
        "print(torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32)"
    )

    assert found == ["False", "True", "high", "True"]


def test_a_script_that_sets_the_older_switch_afterwards_does_not_fail():
    found = run(
        "allow_tf32(); torch.backends.cuda.matmul.allow_tf32 = True;"
        "torch.set_float32_matmul_precision('high'); print(allows('cuda', 'matmul'))"
    )

    assert found == ["True"]


@pytest.mark.skipif(not NEWER, reason="this torch has the older switches only")
def test_a_script_that_speaks_the_newer_family_is_answered_in_it():
    found = run(
        "torch.backends.fp32_precision = 'ieee'\n"
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'\n"
        "print(allows('cuda', 'matmul')); allow_tf32(); print(allows('cuda', 'matmul'))\n"
        "print(torch.backends.cuda.matmul.fp32_precision)"
    )

    assert found == ["False", "True", "tf32"]


@pytest.mark.skipif(not NEWER, reason="this torch has the older switches only")
def test_switched_off_again_it_reads_as_before_to_the_compiler_too():
    found = run(
        "from flatout.techniques.precision.tf32 import forbid_tf32\n"
        "switch = torch.backends.cuda.matmul\n"
        "before = switch.fp32_precision; allow_tf32(); forbid_tf32(before)\n"
        "print(before == switch.fp32_precision, torch.get_float32_matmul_precision())\n"
        "allow_tf32(); print(allows('cuda', 'matmul')); forbid_tf32(before)\n"
        "print(allows('cuda', 'matmul'))"
    )

    assert found == ["True", "highest", "True", "False"]


@pytest.mark.parametrize(
    ("network", "reason"),
    [(nn.Linear(2, 2), "needs a CUDA device"), (nn.Linear(2, 2).half(), "no fp32 parameters")],
)
def test_a_model_that_cannot_gain_is_left_alone(network, reason):
    with pytest.raises(NotApplicable, match=reason):
        Tf32().model(network)


def test_it_is_offered_to_fp32_models_on_an_ampere_gpu():
    facts = profile(kind="cuda", models=(model(),))

    host = machine(device=gpu((8, 0)))

    (found,) = Tf32.candidates(facts, host)

    assert found.predict(facts, host).step_ms == pytest.approx(-100 / 3)


@pytest.mark.parametrize(
    ("facts", "device"),
    [
        (profile(kind="cuda", models=(model(),)), gpu((7, 5))),
        (profile(kind="cuda", models=(model(used_autocast=True),)), gpu()),
        (profile(kind="cuda", models=(model(dtypes=("bfloat16",)),)), gpu()),
        (profile(kind="cpu", models=(model(),)), gpu()),
    ],
)
def test_it_is_not_offered_where_it_cannot_matter(facts, device):
    assert Tf32.candidates(facts, machine(device=device)) == ()


@pytest.mark.parametrize(("kind", "device"), [("cpu", CPU), ("cuda", gpu((7, 5)))])
def test_nothing_is_predicted_of_a_device_without_tf32(kind, device):
    effect = Tf32().predict(profile(kind=kind, models=(model(),)), machine(device=device))

    assert (effect.step_ms, effect.why) == (0.0, "this device has no TF32: nothing gets faster")


@pytest.mark.gpu
def test_products_are_rounded_once_it_is_allowed():
    code = (
        "x = torch.randn(512, 512, device='cuda'); exact = x @ x\n"
        "from flatout.techniques.precision.tf32 import Tf32\n"
        "Tf32().model(torch.nn.Linear(2, 2).cuda())\n"
        "print(torch.equal(x @ x, exact), torch.allclose(x @ x, exact, atol=0.5))"
    )

    assert run(code) == ["False", "True"]
