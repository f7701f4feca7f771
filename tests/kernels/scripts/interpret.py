"""Run the kernels in Triton's interpreter and print how far each case is off, as JSON.

In a process of its own: whether Triton interprets is decided when it is imported.
"""

import json
import mmap
import sys

import torch

from flatout.kernels import gemm

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIZES = {"tiled": (67, 46, 101), "split_k": (35, 20, 1100), "persistent": (67, 48, 104)}
LAYOUTS = ("NN", "NT", "TN", "TT")


def laid(rows, columns, turned, dtype):
    made = torch.randn(columns, rows).t() if turned else torch.randn(rows, columns)
    return made.to(dtype)


def arguments(variant, activation, layout, dtype):
    m, n, k = SIZES[variant]
    if variant == "persistent" and layout[0] == "T":
        m = 72
    width = n // 2 if activation == "swiglu" else n
    return {
        "a": laid(m, k, layout[0] == "T", dtype),
        "b": laid(k, n, layout[1] == "T", dtype),
        "c": torch.randn(m, n).to(dtype),
        "bias": torch.randn(n).to(dtype),
        "residual": torch.randn(m, width).to(dtype),
    }


def off(got, wanted):
    """Return the largest error in units of the largest entry."""
    return ((got.double() - wanted).abs().max() / wanted.abs().max()).item()


def values(variant, activation, layout, dtype):
    given = arguments(variant, activation, layout, DTYPES[dtype])
    exact = {name: tensor.double() for name, tensor in given.items()}
    rest = {"alpha": 0.5, "beta": -1.5, "activation": activation}
    got = gemm(**given, **rest, variant=variant)
    return off(got, gemm(**exact, **rest, variant="reference"))


def gradients(variant, activation):
    given = arguments(variant, activation, "NN", torch.float32)
    exact = {name: tensor.double() for name, tensor in given.items()}
    rest = {"alpha": 0.5, "beta": -1.5, "activation": activation}
    found = []
    for tensors, chosen in ((given, variant), (exact, "reference")):
        leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        gemm(**leaves, **rest, variant=chosen).square().sum().backward()
        found.append([leaf.grad for leaf in leaves.values()])
    return max(off(mine, theirs) for mine, theirs in zip(*found, strict=True))


def never_read():
    a, b = torch.randn(33, 17), torch.randn(17, 9)
    c = torch.full((33, 9), float("nan"))
    return off(gemm(a, b, c, beta=0.0, variant="tiled"), (a @ b).double())


def not_a_number():
    a, b = torch.randn(4, 8), torch.randn(8, 4)
    a[1, 1] = float("nan")
    rows = gemm(a, b, activation="relu2", variant="tiled").isnan().all(dim=1)
    return rows.tolist()


def beyond_32_bits():
    """Read rows that lie 2**29 numbers apart: the last begins beyond 2**31."""
    apart, rows = 2**29, 6
    no_reserve = 0x4000  # of Linux: pages that are never touched cost nothing
    lazily = mmap.mmap(-1, (apart * (rows - 1) + 16) * 4, flags=mmap.MAP_PRIVATE | no_reserve)
    whole = torch.frombuffer(lazily, dtype=torch.float32)
    a = whole.as_strided((rows, 16), (apart, 1))
    a.copy_(torch.randn(rows, 16))
    b = torch.randn(16, 8)
    return off(gemm(a, b, variant="tiled"), (a.contiguous() @ b).double())


def main():
    torch.manual_seed(0)
    found = {}
    for variant in SIZES:
        for activation in ("none", "gelu", "relu2", "swiglu"):
            for dtype in DTYPES:
                found[f"{variant} {activation} {dtype}"] = values(variant, activation, "NN", dtype)
            found[f"{variant} {activation} gradients"] = gradients(variant, activation)
        for layout in LAYOUTS:
            found[f"{variant} {layout}"] = values(variant, "none", layout, "float32")
    found["auto"] = off(
        gemm(torch.ones(5, 3), torch.ones(3, 7)), torch.full((5, 7), 3.0, dtype=torch.float64)
    )
    found["never read"] = never_read()
    found["nothing to sum"] = off(
        gemm(torch.ones(5, 0), torch.ones(0, 7), bias=torch.full((7,), 2.0)),
        torch.full((5, 7), 2.0, dtype=torch.float64),
    )
    found["one row"] = off(
        gemm(torch.ones(1, 1100), torch.ones(1100, 7), variant="split_k"),
        torch.full((1, 7), 1100.0, dtype=torch.float64),
    )
    found["not a number"] = not_a_number()
    found["beyond 32 bits"] = beyond_32_bits()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
