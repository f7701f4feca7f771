"""Compile the kernels for Hopper, which needs no GPU, and print what is in the code, as JSON."""

import itertools
import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from examples.gemm import kernels
from examples.gemm.launch import Tile

TILE = Tile(m=64, n=64, k=64, warps=4, stages=4)
TENSORS = ("a", "b", "c", "bias", "residual", "out", "kept")
LINE_UP = (*TENSORS, "m", "n", "k", "s_a", "s_b", "s_am", "s_bn", "s_om")
WHAT_FOLLOWS = {
    "HAS_C": True,
    "HAS_BIAS": True,
    "HAS_RESIDUAL": True,
    "KEEPS": True,
    "WIDE": False,
    "PRECISION": "ieee",
    "WIDENS": False,
    "GROUP_M": 8,
    "BLOCK_M": TILE.m,
    "BLOCK_N": TILE.n,
    "BLOCK_K": TILE.k,
}


def kind_of(name, known):
    if name in known:
        return "constexpr"
    if name in TENSORS:
        return "*bf16"
    return "fp32" if name in ("alpha", "beta") else "i32"


def compiled(kernel, **own):
    names = kernel.arg_names
    known = {name: value for name, value in {**WHAT_FOLLOWS, **own}.items() if name in names}
    source = ASTSource(
        fn=kernel,
        signature={name: kind_of(name, known) for name in names},
        constexprs={(names.index(name),): value for name, value in known.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if name in LINE_UP
        },
    )
    options = {"num_warps": TILE.warps, "num_stages": TILE.stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code = made.asm["ptx"]
    return {
        "tensor memory accelerator": "cp.async.bulk.tensor" in code,
        "warp-group products": "wgmma" in code,
        "shared_bytes": made.metadata.shared,
    }


found = {}
for activation, a_turned, b_turned in itertools.product(
    ("none", "swiglu"), (False, True), (False, True)
):
    found[f"persistent {activation} {'NT'[a_turned]}{'NT'[b_turned]}"] = compiled(
        kernels.persistent_kernel,
        ACTIVATION=activation,
        A_TURNED=a_turned,
        B_TURNED=b_turned,
        PROGRAMS=132,
    )
found["tiled"] = compiled(kernels.tiled_kernel, ACTIVATION="gelu", s_ak=1, s_bk=1)
print(json.dumps(found))
