"""What tiling does for a product, a convolution and attention, on one core of this machine's CPU.

    python scenarios/tiling.py                    # all three, fp32
    python scenarios/tiling.py --only product --size 1024  # columns that share cache sets

The same numbers in several ways, from plain loops to the library. It needs torch and a C compiler,
counts what the caches fetched where the machine lets it, and docs/tiling.md explains it.
"""

import argparse
import ctypes
import errno
import fcntl
import json
import os
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

SOURCE = """
#include <math.h>
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

// A convolution of 3 x 3, stride 1. X: c planes of (side + 2) x (side + 2), its border zeros.
// One result after the other: all c planes pass by for each of the c planes of the result.
#define PLANE (side + 2) * (side + 2)
void conv_naive(in X, in K, out Y, long c, long side) {
    for (long o = 0; o < c; o++)
        for (long y = 0; y < side; y++)
            for (long x = 0; x < side; x++) {
                float sum = 0;
                for (long i = 0; i < c; i++)
                    for (long u = 0; u < 3; u++)
                        for (long v = 0; v < 3; v++)
                            sum += K[((o * c + i) * 3 + u) * 3 + v] *
                                   X[i * PLANE + (y + u) * (side + 2) + x + v];
                Y[(o * side + y) * side + x] = sum;
            }
}

// R planes x W columns of the result in registers: what is fetched of X serves R planes at once.
void conv_registers(in X, in K, out Y, long c, long side) {
    for (long o0 = 0; o0 < c; o0 += R)
        for (long y = 0; y < side; y++)
            for (long x0 = 0; x0 < side; x0 += W) {
                float sum[R][W] = {{0}};
                for (long i = 0; i < c; i++)
                    for (long u = 0; u < 3; u++)
                        for (long v = 0; v < 3; v++) {
                            in row = X + i * PLANE + (y + u) * (side + 2) + x0 + v;
                            for (long r = 0; r < R; r++) {
                                float k = K[(((o0 + r) * c + i) * 3 + u) * 3 + v];
                                for (long w = 0; w < W; w++) sum[r][w] += k * row[w];
                            }
                        }
                for (long r = 0; r < R; r++)
                    memcpy(Y + ((o0 + r) * side + y) * side + x0, sum[r], sizeof sum[r]);
            }
}

// Attention of one head, D numbers a token, K with its tokens along the columns. S: the scores,
// n x n of them, between the two products.
#define D 64
static void softmax(out S, long n) {
    for (long i = 0; i < n; i++) {
        float most = -INFINITY, sum = 0;
        for (long j = 0; j < n; j++) most = fmaxf(most, S[i * n + j]);
        for (long j = 0; j < n; j++) sum += S[i * n + j] = expf(S[i * n + j] - most);
        for (long j = 0; j < n; j++) S[i * n + j] /= sum;
    }
}

void attention_naive(in Q, in K, in V, out S, out O, long n) {
    for (long i = 0; i < n; i++)
        for (long j = 0; j < n; j++) {
            float sum = 0;
            for (long k = 0; k < D; k++) sum += Q[i * D + k] * K[k * n + j];
            S[i * n + j] = sum * 0.125f;
        }
    softmax(S, n);
    for (long i = 0; i < n; i++)
        for (long k = 0; k < D; k++) {
            float sum = 0;
            for (long j = 0; j < n; j++) sum += S[i * n + j] * V[j * D + k];
            O[i * D + k] = sum;
        }
}

// Scores of R queries and W keys, in registers.
static inline void scores(in Q, in K, long n, long j0, float s[R][W]) {
    memset(s, 0, sizeof(float) * R * W);
    for (long k = 0; k < D; k++)
        for (long r = 0; r < R; r++)
            for (long w = 0; w < W; w++) s[r][w] += Q[r * D + k] * K[k * n + j0 + w];
    for (long r = 0; r < R; r++)
        for (long w = 0; w < W; w++) s[r][w] *= 0.125f;
}

// Both products in register tiles; the scores still go to memory and come back, three times.
void attention_registers(in Q, in K, in V, out S, out O, long n) {
    for (long i0 = 0; i0 < n; i0 += R)
        for (long j0 = 0; j0 < n; j0 += W) {
            float s[R][W];
            scores(Q + i0 * D, K, n, j0, s);
            for (long r = 0; r < R; r++) memcpy(S + (i0 + r) * n + j0, s[r], sizeof s[r]);
        }
    softmax(S, n);
    for (long i0 = 0; i0 < n; i0 += R)
        for (long h = 0; h < D; h += W) {
            float sum[R][W] = {{0}};
            for (long j = 0; j < n; j++)
                for (long r = 0; r < R; r++)
                    for (long w = 0; w < W; w++)
                        sum[r][w] += S[(i0 + r) * n + j] * V[j * D + h + w];
            for (long r = 0; r < R; r++) memcpy(O + (i0 + r) * D + h, sum[r], sizeof sum[r]);
        }
}

// Keys pass by W at a time and are never seen again: of each row its maximum so far, the sum of
// its exponentials and its result are kept, and scaled down when a larger maximum comes
// (Milakov and Gimelshein 2018; FlashAttention, Dao and others 2022). No score reaches memory.
void attention_tiled(in Q, in K, in V, out S, out O, long n) {
    for (long i0 = 0; i0 < n; i0 += R) {
        float most[R], sum[R] = {0}, kept[R][D] = {{0}}, s[R][W];
        for (long r = 0; r < R; r++) most[r] = -INFINITY;
        for (long j0 = 0; j0 < n; j0 += W) {
            scores(Q + i0 * D, K, n, j0, s);
            for (long r = 0; r < R; r++) {
                float now = most[r];
                for (long w = 0; w < W; w++) now = fmaxf(now, s[r][w]);
                float scale = expf(most[r] - now);
                most[r] = now;
                sum[r] *= scale;
                for (long w = 0; w < W; w++) sum[r] += s[r][w] = expf(s[r][w] - now);
                for (long k = 0; k < D; k++) kept[r][k] *= scale;
            }
            for (long h = 0; h < D; h += W) {
                float part[R][W] = {{0}};
                for (long w = 0; w < W; w++)
                    for (long r = 0; r < R; r++)
                        for (long k = 0; k < W; k++)
                            part[r][k] += s[r][w] * V[(j0 + w) * D + h + k];
                for (long r = 0; r < R; r++)
                    for (long k = 0; k < W; k++) kept[r][h + k] += part[r][k];
            }
        }
        for (long r = 0; r < R; r++)
            for (long k = 0; k < D; k++) O[(i0 + r) * D + k] = kept[r][k] / sum[r];
    }
}
"""
LEAST_MULTIPLE = 64  # sizes are multiples of it, so that no loop needs an end of its own
TILES = (16, 32, 64, 128, 256)
WARM_UP = 1
CHANNELS, SIDE, HEAD = 64, 64, 64
MEANINGS = {
    "naive": "one result after the other",
    "rows": "loops swapped, along the rows of B",
    "registers": "tiles of the result in registers",
    "tiled": "no score reaches memory",
    "torch": "the library",
}
COUNTERS = {"into L1": (3, 1 << 16), "from memory": (0, 3)}
"""Type and configuration of perf_event_open(2): reads that missed the first data cache, and misses
of the last one."""
NO_PERMISSION = "not allowed here: sysctl kernel.perf_event_paranoid=1 allows it"
NO_COUNTER = "this machine gives no counters, as virtual machines often do not"


def compiled(folder):
    """Return the loops as functions, compiled for this very CPU."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise SystemExit("no C compiler (cc, gcc or clang) is installed: nothing to measure")
    source, library = folder / "loops.c", folder / "loops.so"
    source.write_text(SOURCE)
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library), "-lm"], check=True)
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


class Counter:
    """A counter of the processor, for this thread outside the kernel; `OSError` without one."""

    def __init__(self, kind, config):
        number = {"x86_64": 298, "aarch64": 241}.get(platform.machine())
        if sys.platform != "linux" or number is None:
            raise OSError(errno.ENODEV, NO_COUNTER)
        # The first 64 bytes of perf_event_attr: with how long it was on and how long it counted,
        # since more counters than the processor has take turns; off, no kernel, no hypervisor.
        attributes = struct.pack("=IIQQQQQ16x", kind, 64, config, 0, 0, 0b11, 0b1100001)
        libc = ctypes.CDLL(None, use_errno=True)
        self.file = libc.syscall(number, attributes, 0, -1, -1, 0)
        if self.file < 0:
            denied = ctypes.get_errno() in {errno.EACCES, errno.EPERM}
            raise OSError(ctypes.get_errno(), NO_PERMISSION if denied else NO_COUNTER)

    def during(self, call):
        """Return how often it happened during a call."""
        for request in (0x2403, 0x2400):  # back to 0, on
            fcntl.ioctl(self.file, request, 0)
        before = struct.unpack("=QQQ", os.read(self.file, 24))
        call()
        fcntl.ioctl(self.file, 0x2401, 0)  # off
        after = struct.unpack("=QQQ", os.read(self.file, 24))
        count, on, counted = (last - first for first, last in zip(before, after, strict=True))
        return round(count * on / counted) if counted else 0


def line_bytes():
    """Return how many bytes a cache fetches at once."""
    path = Path("/sys/devices/system/cpu/cpu0/cache/index0/coherency_line_size")
    return int(path.read_text()) if path.is_file() else 64


def counters():
    """Return the counters by name, and why there are none."""
    try:
        return {name: Counter(*which) for name, which in COUNTERS.items()}, ""
    except OSError as error:
        return {}, error.strerror


def run(loops, name, tensors, *sizes):
    """Call a loop; the last of the tensors is its result."""
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    getattr(loops, name)(*pointers, *map(ctypes.c_long, sizes))
    return tensors[-1]


def product(loops, size):
    """Return its operations, the ways by name, and the exact result."""
    a, b = torch.randn(size, size), torch.randn(size, size)

    def loop(name, *more):
        c = torch.empty(size, size)
        return lambda: run(loops, name, (a, b, c), size, *more)

    found = {
        "naive": loop("naive"),
        "rows": loop("rows"),
        **{f"tiled {t}": loop("tiled", t) for t in TILES if t < size},
        "registers": loop("registers"),
        "torch": lambda: a @ b,
    }
    return 2 * size**3, found, a.double() @ b.double()


def convolution(loops, size):
    """As `product`: one image, as many planes in as out, 3 x 3."""
    channels = min(size, CHANNELS)
    image = torch.randn(channels, SIDE, SIDE)
    weight = torch.randn(channels, channels, 3, 3)
    padded = F.pad(image, (1, 1, 1, 1)).contiguous()

    def loop(name):
        out = torch.empty(channels, SIDE, SIDE)
        return lambda: run(loops, f"conv_{name}", (padded, weight, out), channels, SIDE)

    found = {name: loop(name) for name in ("naive", "registers")}
    found["torch"] = lambda: F.conv2d(image[None], weight, padding=1)[0]
    exact = F.conv2d(image[None].double(), weight.double(), padding=1)[0]
    return 2 * channels**2 * 9 * SIDE**2, found, exact


def attention(loops, size):
    """As `product`: one head, twice as many tokens as the product has rows."""
    tokens = 2 * size
    q, k, v = (torch.randn(tokens, HEAD) for _ in range(3))
    turned, scores = k.t().contiguous(), torch.empty(tokens, tokens)

    def loop(name):
        out = torch.empty(tokens, HEAD)
        given = (q, turned, v, scores, out)
        return lambda: run(loops, f"attention_{name}", given, tokens)

    found = {name: loop(name) for name in ("naive", "registers", "tiled")}
    found["torch"] = lambda: F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    exact = F.scaled_dot_product_attention(*(x[None].double() for x in (q, k, v)))[0]
    return 4 * tokens**2 * HEAD, found, exact


LESSONS = {"product": product, "convolution": convolution, "attention": attention}


def measured(name, loops, args, counting):
    """Return a lesson's operations, the seconds of each way, and the bytes that it fetched."""
    torch.manual_seed(0)
    flops, ways, exact = LESSONS[name](loops, args.size)
    for way, call in ways.items():
        off = (call().double() - exact).abs().max() / exact.abs().max()
        if off > 1e-5:
            raise SystemExit(f"{name}, {way} is wrong by {off:.1e}")
    times = {way: seconds(call, args.repeats) for way, call in ways.items()}
    fetched = {
        way: {what: one.during(call) * line_bytes() for what, one in counting.items()}
        for way, call in ways.items()
    }
    return {"flops": flops, "ways": times, "fetched": fetched}


def table(name, found, counting):
    """Print a lesson's table."""
    naive_s = statistics.median(found["ways"]["naive"])
    more = "".join(f" {what:>12}" for what in counting)
    print(f"\n{name:12} {'time':>10} {'GFLOP/s':>8} {'against naive':>14}{more}")
    for way, times in found["ways"].items():
        spent_s = statistics.median(times)
        bytes_ = "".join(f" {value / 1e9:9.3f} GB" for value in found["fetched"][way].values())
        meaning = MEANINGS.get(way, "tiles of that many rows in the caches")
        print(
            f"{way:12} {1e3 * spent_s:7.1f} ms {found['flops'] / spent_s / 1e9:8.1f} "
            f"{naive_s / spent_s:13.1f}x{bytes_}  {meaning}"
        )


def main():
    """Measure every way and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=LESSONS, help="one of the three")
    parser.add_argument("--size", type=int, default=960, help="rows and columns of the product")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON, not tables")
    args = parser.parse_args()
    if args.size % LEAST_MULTIPLE or args.size <= 0:
        parser.error(f"the size has to be a multiple of {LEAST_MULTIPLE}")
    torch.set_num_threads(1)
    counting, why_not = counters()
    with tempfile.TemporaryDirectory() as folder:
        loops = compiled(Path(folder))
        chosen = [args.only] if args.only else LESSONS
        found = {name: measured(name, loops, args, counting) for name in chosen}
    if args.json:
        print(json.dumps({"size": args.size, "lessons": found, "not_counted": why_not}))
        return
    print(f"fp32, one thread, median of {args.repeats}; the product: {args.size} x {args.size}")
    for name, one in found.items():
        table(name, one, counting)
    if why_not:
        print(f"\nWhat the caches fetched is not counted: {why_not}.")


if __name__ == "__main__":
    main()
