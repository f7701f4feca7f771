"""What tiling does for a matrix product, measured on this machine's CPU, one thread.

    python examples/tiling.py                # 960 x 960, fp32
    python examples/tiling.py --size 1024    # a power of two is special: columns share cache sets

Five ways to compute the same C = A @ B, from three plain loops to the library. It needs torch and
a C compiler, and prints what it measured; docs/tiling.md explains it.
"""

import argparse
import ctypes
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

SOURCE = """
#include <string.h>
#define MIN(a, b) ((a) < (b) ? (a) : (b))
typedef const float *restrict in;
typedef float *restrict out;

// One result after the other. The inner loop walks down a column of B: each number lies in
// another cache line, of which 15 other numbers are fetched and thrown away.
void naive(in A, in B, out C, long n) {
    for (long i = 0; i < n; i++)
        for (long j = 0; j < n; j++) {
            float sum = 0;
            for (long k = 0; k < n; k++) sum += A[i * n + k] * B[k * n + j];
            C[i * n + j] = sum;
        }
}

// The same additions in the same order, the loops swapped: now rows of B and C are walked along,
// whole cache lines are used, and the compiler can do several numbers at once. But all of B passes
// by for each row of A.
void rows(in A, in B, out C, long n) {
    memset(C, 0, n * n * sizeof(float));
    for (long i = 0; i < n; i++)
        for (long k = 0; k < n; k++) {
            float a = A[i * n + k];
            for (long j = 0; j < n; j++) C[i * n + j] += a * B[k * n + j];
        }
}

// Tile by tile: t x t numbers of B stay in the cache while t rows of A need them, so B passes by
// n / t times and not n times.
void tiled(in A, in B, out C, long n, long t) {
    memset(C, 0, n * n * sizeof(float));
    for (long i0 = 0; i0 < n; i0 += t)
        for (long k0 = 0; k0 < n; k0 += t)
            for (long j0 = 0; j0 < n; j0 += t)
                for (long i = i0; i < MIN(i0 + t, n); i++)
                    for (long k = k0; k < MIN(k0 + t, n); k++) {
                        float a = A[i * n + k];
                        long end = MIN(j0 + t, n);
                        for (long j = j0; j < end; j++) C[i * n + j] += a * B[k * n + j];
                    }
}

// Tiles in tiles: R x W results stay in registers for a whole run along k, so C is not read and
// written for every single multiplication. This is the shape of every fast kernel, also on a GPU.
#define R 4
#define W 32
void registers(in A, in B, out C, long n) {
    for (long j0 = 0; j0 < n; j0 += W)
        for (long i0 = 0; i0 < n; i0 += R) {
            float sum[R][W] = {{0}};
            for (long k = 0; k < n; k++)
                for (long r = 0; r < R; r++)
                    for (long w = 0; w < W; w++)
                        sum[r][w] += A[(i0 + r) * n + k] * B[k * n + j0 + w];
            for (long r = 0; r < R; r++) memcpy(C + (i0 + r) * n + j0, sum[r], sizeof sum[r]);
        }
}
"""
LEAST_MULTIPLE = 64  # sizes are multiples of it, so that no loop needs an end of its own
TILES = (16, 32, 64, 128, 256)
WARM_UP = 1


def compiled(folder):
    """Return the loops as functions, compiled for this very CPU."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise SystemExit("no C compiler (cc, gcc or clang) is installed: nothing to measure")
    source, library = folder / "loops.c", folder / "loops.so"
    source.write_text(SOURCE)
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def seconds(call, repeats):
    """Return what each of several calls took, the first ones left out."""
    for _ in range(WARM_UP):
        call()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found


def ways(loops, size):
    """Return the ways by name; one that computes something else is an error."""
    torch.manual_seed(0)
    a, b = torch.randn(size, size), torch.randn(size, size)
    wanted = a.double() @ b.double()

    def loop(name, *more):
        c = torch.empty(size, size)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, c)]
        sizes = [ctypes.c_long(value) for value in (size, *more)]

        def call():
            getattr(loops, name)(*pointers, *sizes)
            return c

        return call

    found = {
        "naive": loop("naive"),
        "rows": loop("rows"),
        **{f"tiled {t}": loop("tiled", t) for t in TILES if t < size},
        "registers": loop("registers"),
        "torch": lambda: a @ b,
    }
    for name, call in found.items():
        off = (call().double() - wanted).abs().max() / wanted.abs().max()
        if off > 1e-5:
            raise SystemExit(f"{name} is wrong by {off:.1e}")
    return found


def main():
    """Measure every way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=960, help="rows and columns")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    args = parser.parse_args()
    if args.size % LEAST_MULTIPLE or args.size <= 0:
        parser.error(f"the size has to be a multiple of {LEAST_MULTIPLE}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = ways(compiled(Path(folder)), args.size)
        rows = {name: seconds(call, args.repeats) for name, call in found.items()}
    if args.json:
        print(json.dumps({"size": args.size, "ways": rows}))
        return
    flops = 2 * args.size**3
    naive_s = statistics.median(rows["naive"])
    print(f"{args.size} x {args.size}, fp32, one thread, median of {args.repeats}\n")
    print(f"{'way':10} {'time':>10} {'GFLOP/s':>8} {'against naive':>14}")
    for name, times in rows.items():
        spent_s = statistics.median(times)
        print(
            f"{name:10} {1e3 * spent_s:7.1f} ms {flops / spent_s / 1e9:8.1f} "
            f"{naive_s / spent_s:13.1f}x"
        )


if __name__ == "__main__":
    main()
