"""Compile the lookup for Hopper, which needs no GPU, and print the sizes of the code, as JSON."""

import itertools
import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flatout.kernels.lookup_triton import lookup_kernel

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"source": "*u8", "rows": "*i64", "boxes": "*i64"}
BOXES = {"COLUMNS": 5, "TOP": 0, "LEFT": 1, "FLIP": 4}


def build(moved, **known):
    """Compile with some sizes known to be 1, as Triton does where they are."""
    given = {"LEVELS": 256, "BLOCK": 1024, **BOXES, **known}
    signature, constants = {}, {}
    for place, name in enumerate(lookup_kernel.arg_names):
        signature[name] = {**POINTERS, "table": moved, "out": moved}.get(name, "i32")
        if name in given:
            signature[name] = "constexpr"
            constants[(place,)] = given[name]
    built = triton.compile(ASTSource(lookup_kernel, signature, constants, {}), target=HOPPER)
    return len(built.asm["cubin"])


found = {}
for moved, channel, has_boxes in itertools.product(
    ("*u8", "*i16", "*i32", "*i64"), (-1, 0, 1, 2, 3), (False, True)
):
    name = f"{moved} {channel} {has_boxes}"
    found[name] = build(moved, CHANNEL=channel, HAS_BOXES=has_boxes)
ONES = ("count_j", "count_k", "inner", "blocks", "last_across", "s_i", "s_j", "s_k", "o_k")
for name, has_boxes in itertools.product(ONES, (False, True)):
    found[f"{name}=1 {has_boxes}"] = build("*i32", CHANNEL=2, HAS_BOXES=has_boxes, **{name: 1})
print(json.dumps(found))
