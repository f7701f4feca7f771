"""Run the kernels in Triton's interpreter and print how far each case is off, as JSON.

In a process of its own: whether Triton interprets is decided when it is imported.
"""

import json
import mmap
import sys

import torch

from examples.gemm import gemm

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIZES = {"tiled": (67, 46, 101), "persistent": (67, 48, 104)}
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


def far(rows, columns, apart):
    """Return random rows that lie so many numbers apart."""
    no_reserve = 0x4000  # of Linux: pages that are never touched cost nothing
    size = (apart * (rows - 1) + columns) * 4
    lazily = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | no_reserve)
    found = torch.frombuffer(lazily, dtype=torch.float32).as_strided((rows, columns), (apart, 1))
    return found.copy_(torch.randn(rows, columns))


def read_beyond_32_bits(variant, a, b, activation="none"):
    exact = gemm(a.double(), b.double(), activation=activation, variant="reference")
    return off(gemm(a, b, activation=activation, variant=variant), exact)


def written_beyond_32_bits(variant, activation):
    """Compute with everything but the operands in rows whose last begins beyond 2**31."""
    from examples.gemm import launch

    rows, width, apart = 6, 8, 2**29
    columns = 2 * width if activation == "swiglu" else width
    given = {"a": torch.randn(rows, 1032), "b": torch.randn(1032, columns)}
    given |= {"c": far(rows, columns, apart), "bias": torch.randn(columns)}
    given |= {"residual": far(rows, width, apart)}
    rest = {"alpha": 0.5, "beta": -1.5, "activation": activation}
    out, kept = far(rows, width, apart), far(rows, columns, apart)
    launch.run(launch.KernelCall(**given, **rest, out=out, kept=kept), variant)
    exact = {name: tensor.double() for name, tensor in given.items()}
    before = gemm(
        **{**exact, "residual": None}, **{**rest, "activation": "none"}, variant="reference"
    )
    return max(off(out, gemm(**exact, **rest, variant="reference")), off(kept, before))


def beyond_32_bits():
    """Offsets of every tensor that no 32 bits hold, in operands and results of a few numbers."""
    found = {}
    for variant in SIZES:
        turned = far(8, 16, 2**29).t()
        found[f"{variant} a"] = read_beyond_32_bits(variant, far(6, 16, 2**29), torch.randn(16, 8))
        found[f"{variant} b"] = read_beyond_32_bits(variant, torch.randn(6, 16), turned)
        # The right half alone lies beyond, by n times the distance of two columns.
        halves = far(16, 8, 2**28).t()
        found[f"{variant} swiglu"] = read_beyond_32_bits(
            variant, torch.randn(6, 8), halves, "swiglu"
        )
        for activation in ("gelu", "swiglu"):
            found[f"{variant} {activation} out"] = written_beyond_32_bits(variant, activation)
    # One step along K is 2**31 numbers; the hardware's descriptors take no steps.
    steps = far(70, 4, 2**26)
    found["tiled steps of a"] = read_beyond_32_bits("tiled", steps.t(), torch.randn(70, 8))
    found["tiled steps of b"] = read_beyond_32_bits("tiled", torch.randn(5, 70), steps)
    return found


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
        gemm(torch.ones(1, 1100), torch.ones(1100, 7), variant="tiled"),
        torch.full((1, 7), 1100.0, dtype=torch.float64),
    )
    found["not a number"] = not_a_number()
    found |= {f"beyond 32 bits: {name}": value for name, value in beyond_32_bits().items()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
