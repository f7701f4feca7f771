"""Compile the kernels for Hopper, which needs no GPU, and print what came out, as JSON."""

import json
import os
import sys

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from examples.gemm import kernels
from examples.gemm.launch import tiles_worth_trying

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = dict.fromkeys(("a", "b", "c", "bias", "residual", "out", "kept"), "*bf16")
OTHERS = {"alpha": "fp32", "beta": "fp32"}
ONES = {"s_ak": 1, "s_bn": 1, "s_cn": 1, "s_rn": 1, "s_on": 1, "s_kn": 1}
ALIGNED = ("m", "n", "k", "s_am", "s_bk", "s_a", "s_b", "s_cm", "s_rm", "s_om", "s_km")
FOLLOWS = {"HAS_C": True, "HAS_BIAS": True, "HAS_RESIDUAL": True, "KEEPS": True}
ARITHMETIC = {"WIDE": False, "PRECISION": "ieee", "WIDENS": False, "GROUP_M": 8}


def build(kernel, tile, **known):
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    given = {**ONES, **FOLLOWS, **ARITHMETIC, **blocks, **known}
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = (POINTERS | OTHERS).get(name, "i32")
        if name in given:
            signature[name] = "constexpr"
            constants[(place,)] = given[name]
        elif signature[name].startswith("*") or name in ALIGNED:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = triton.compile(source, target=HOPPER, options=options)
    ptx = built.asm["ptx"]
    return {
        "shared_bytes": built.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "tma": ptx.count("cp.async.bulk.tensor"),
        "has_binary": len(built.asm["cubin"]) > 0,
    }


def main():
    found = {}
    for activation in ("none", "swiglu"):
        sides = 2 if activation == "swiglu" else 1
        for tile in tiles_worth_trying(4096, 4096, 2, right_sides=sides):
            name = f"{activation} {tile.m}x{tile.n}x{tile.k}"
            turns = {"A_TURNED": False, "B_TURNED": True, "PROGRAMS": 132}
            found[f"tiled {name}"] = build(kernels.tiled_kernel, tile, ACTIVATION=activation)
            found[f"persistent {name}"] = build(
                kernels.persistent_kernel, tile, ACTIVATION=activation, **turns
            )
    tile = tiles_worth_trying(64, 64, 2)[0]
    wide = {"WIDE": True, "ACTIVATION": "relu2"}
    found["tiled wide"] = build(kernels.tiled_kernel, tile, **wide)
    found["tiled wide swiglu"] = build(kernels.tiled_kernel, tile, WIDE=True, ACTIVATION="swiglu")
    turns = {"A_TURNED": False, "B_TURNED": True, "PROGRAMS": 132}
    found["persistent wide"] = build(kernels.persistent_kernel, tile, **wide, **turns)
    # Triton compiles a size of 1 in: every kernel has to take that too.
    for size in ("m", "n", "k"):
        one = {size: 1, "ACTIVATION": "swiglu"}
        turns = {"A_TURNED": True, "B_TURNED": False, "PROGRAMS": 132}
        found[f"tiled {size}=1"] = build(kernels.tiled_kernel, tile, **one)
        found[f"tiled {size}=1 wide"] = build(kernels.tiled_kernel, tile, **one, WIDE=True)
        found[f"persistent {size}=1"] = build(kernels.persistent_kernel, tile, **one, **turns)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
