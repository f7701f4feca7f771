"""The product: kernels in Triton's interpreter, plain operations, gradients, torch.compile."""

from contextlib import contextmanager

import pytest
import torch

from examples.gemm import gemm
from examples.gemm.launch import SHARED_BYTES
from examples.gemm.product import kernel_available
from tests.kernels.interpreter import needs_triton, printed

OFF = {"float32": 1e-6, "gradients": 2e-6, "float16": 2**-10, "bfloat16": 2**-6}
"""Half a unit in the last place of the largest entry, twice that for what the interpreter cuts
off instead of rounding, twice that again for bf16's intermediate steps; fp32 adds its summation."""
VARIANTS = ("tiled", "persistent")
ACTIVATIONS = ("none", "gelu", "relu2", "swiglu")


def interpreted():
    return printed("interpret.py", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", OFF)
def test_a_kernel_agrees_with_float64(variant, activation, kind):
    assert interpreted()[f"{variant} {activation} {kind}"] < OFF[kind]


@needs_triton
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_operands_may_lie_in_rows_or_columns(variant, layout):
    assert interpreted()[f"{variant} {layout}"] < OFF["float32"]


@needs_triton
def test_with_beta_0_the_kernel_never_reads_c():
    assert interpreted()["never read"] < OFF["float32"]


@needs_triton
def test_what_is_no_number_stays_none_in_its_row_only():
    assert interpreted()["not a number"] == [False, True, False, False]


@needs_triton
@pytest.mark.parametrize("case", ["nothing to sum", "one row"])
def test_the_smallest_sizes_work_too(case):
    assert interpreted()[case] == 0


@needs_triton
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("what", ["a", "b", "swiglu", "gelu out", "swiglu out"])
def test_offsets_may_need_more_than_32_bits(variant, what):
    assert interpreted()[f"beyond 32 bits: {variant} {what}"] < OFF["float32"]


@needs_triton
@pytest.mark.parametrize("operand", ["a", "b"])
def test_a_step_along_k_may_need_more_than_32_bits(operand):
    assert interpreted()[f"beyond 32 bits: tiled steps of {operand}"] < OFF["float32"]


@needs_triton
def test_a_variant_is_chosen():
    assert interpreted()["auto"] == 0


@needs_triton
@pytest.mark.slow
def test_the_kernels_compile_for_hopper_with_its_own_instructions():
    built = printed("build.py")

    assert all(one["has_binary"] for one in built.values())
    assert all(one["shared_bytes"] <= 227 * 1024 for one in built.values())
    assert all(one["wgmma"] > 0 for one in built.values())
    assert all((one["tma"] > 0) is name.startswith("persistent") for name, one in built.items())


@needs_triton
@pytest.mark.parametrize("name", ["tiled_kernel", "persistent_kernel"])
def test_the_tuner_gets_the_tiles_that_are_worth_trying(name):
    from examples.gemm import launch

    tuner = launch._tuned(getattr(launch, name))
    tuner.nargs = {"a": torch.zeros(1, dtype=torch.bfloat16), "m": 4096, "n": 4096, "k": 64}
    chosen = tuner.prune_configs({"ACTIVATION": "swiglu"})

    sizes = {(c.kwargs["BLOCK_M"], c.kwargs["BLOCK_N"]) for c in chosen}
    assert (128, 128) in sizes
    assert (256, 128) not in sizes  # two right sides: too many numbers for the registers
    assert {"m", "n", "k", "ACTIVATION"} <= set(tuner.keys)


def laid_out(activation, dtype=torch.float64):
    torch.manual_seed(0)
    width = 3 if activation == "swiglu" else 6
    shapes = {"a": (2, 5, 7), "b": (7, 6), "c": (2, 5, 6), "bias": (6,), "residual": (2, 5, width)}
    return {
        name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_differences(activation):
    given = laid_out(activation)

    def product(*tensors):
        named = dict(zip(given, tensors, strict=True))
        return gemm(**named, alpha=0.5, beta=-1.5, activation=activation)

    assert torch.autograd.gradcheck(product, tuple(given.values()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_gradients_are_those_of_differences(activation):
    """As a gradient penalty takes them: through what went into the activation, too."""
    given = laid_out(activation)

    def product(*tensors):
        named = dict(zip(given, tensors, strict=True))
        return gemm(**named, alpha=0.5, beta=-1.5, activation=activation)

    assert torch.autograd.gradgradcheck(product, tuple(given.values()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_compile_takes_it_whole_and_gets_the_same(activation):
    given = laid_out(activation, torch.float32)

    def loss(**tensors):
        return gemm(**tensors, beta=2.0, activation=activation).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    plain = torch.autograd.grad(loss(**given), list(given.values()))
    found = torch.autograd.grad(compiled(**given), list(given.values()))

    torch.testing.assert_close(found, plain)


def test_the_operator_is_what_its_schema_says():
    given = laid_out("gelu")
    tensors = [
        None if tensor is None else tensor.detach().reshape(-1, tensor.shape[-1]).requires_grad_()
        for name, tensor in given.items()
        if name != "bias"
    ]
    a, b, c, residual = tensors
    arguments = (a, b, c, given["bias"], residual, 0.5, 2.0, "gelu", True, "auto")

    torch.library.opcheck(torch.ops.flatout.gemm.default, arguments)


def test_autocast_casts_as_a_product_would():
    a, b = torch.randn(4, 8), torch.randn(8, 4)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gemm(a, b, bias=torch.zeros(4))

    assert found.dtype == torch.bfloat16


def test_without_gradients_nothing_is_kept():
    given = laid_out("gelu")

    with torch.no_grad():
        assert gemm(**given, beta=1.0, activation="gelu").grad_fn is None


def test_the_kernel_is_for_a_gpu_and_its_dtypes():
    assert not kernel_available(torch.device("cpu"), torch.float32)
    assert not kernel_available(torch.device("cuda"), torch.float64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": "gelo"}, "no activation 'gelo'"),
        ({"variant": "fast"}, "no variant 'fast'"),
        ({"b": torch.zeros(3, 4)}, r"cannot multiply \(2, 7\) by \(3, 4\)"),
        ({"b": torch.zeros(7, 3), "activation": "swiglu"}, "even number of columns"),
        ({"bias": torch.zeros(3)}, r"bias has shape \(3,\), it must have \(4,\)"),
        ({"residual": torch.zeros(2, 3)}, "residual has shape"),
        ({"a": torch.zeros(2, 7, dtype=torch.float64)}, "one dtype"),
    ],
)
def test_what_does_not_fit_together_says_so(change, words):
    with pytest.raises(ValueError, match=words):
        gemm(**{"a": torch.zeros(2, 7), "b": torch.zeros(7, 4), **change})


ON_GPU = [(variant, activation, 64) for variant in VARIANTS for activation in ACTIVATIONS]
ON_GPU += [(variant, "none", 512) for variant in VARIANTS]
"""Small ones have one tile to compile, so that all of them take a minute; large ones tune."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("variant", "activation", "size"), ON_GPU)
def test_on_a_gpu_a_kernel_agrees_with_float64(variant, activation, size):
    torch.manual_seed(0)
    shapes = (size, 512), (512, size)
    a, b = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)

    found = gemm(a, b, activation=activation, variant=variant).double()

    wanted = gemm(a.double(), b.double(), activation=activation, variant="reference")
    assert (found - wanted).abs().max() / wanted.abs().max() < OFF["bfloat16"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("variant", ["tiled", "persistent"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_on_a_gpu_gradients_agree_with_float64(variant, activation):
    torch.manual_seed(0)
    width = 32 if activation == "swiglu" else 64
    shapes = {"a": (64, 64), "b": (64, 64), "bias": (64,), "residual": (64, width)}
    given = {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}
    exact = {name: tensor.double() for name, tensor in given.items()}
    found = []

    for tensors, chosen in ((given, variant), (exact, "reference")):
        leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        gemm(**leaves, activation=activation, variant=chosen).square().sum().backward()
        found.append([leaf.grad.double() for leaf in leaves.values()])

    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).abs().max() / theirs.abs().max() < 1e-5


@needs_triton
@pytest.mark.slow
def test_the_kernels_compile_for_hopper_and_use_its_units():
    found = printed("compile_for_hopper.py")

    assert len(found) == 9
    for name, seen in found.items():
        assert seen["warp-group products"], name
        assert seen["tensor memory accelerator"] == name.startswith("persistent"), name
        assert seen["shared_bytes"] <= SHARED_BYTES, name


def test_a_kernel_runs_on_the_device_of_its_operands(monkeypatch):
    pytest.importorskip("triton")
    from examples.gemm import launch

    entered = []

    @contextmanager
    def device(chosen):
        entered.append(chosen)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    with launch.on_device(torch.device("cuda", 1)):
        pass
    with launch.on_device(torch.device("cpu")):
        pass

    assert entered == [torch.device("cuda", 1)]
