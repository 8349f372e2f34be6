"""Speed of the native matrix products at a model's shapes, next to what the machine could read or multiply.

    python benchmarks/products.py [--isa amx] [--bits 4] [--rows 1 16] [--threads 1 2]

Each shape has as many matrices as SmolLM2-135M has layers, so a pass streams the model's weights as a
decode step does. The reading limit is libc's memchr over as many bytes; the multiplying limit is
what the product's instruction does at best (--peak, GMAC/s of one core).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.kernels.cpu import build, packed
from engine.kernels.cpu.library import open_library

CACHE = Path("~/.cache/quaver/kernels")
#: Outputs, inputs and number of the matrices of SmolLM2-135M.
SHAPES = {
    "qkv": (960, 576, 30),
    "o": (576, 576, 30),
    "gate_up": (3072, 576, 30),
    "down": (576, 1536, 30),
    "head": (49152, 576, 1),
}
REPEATS = 7
GROUP = 8  # panels of one wide product, as a step takes them


def best_time(threads: int, work: Callable[[int], None]) -> float:
    """Return the shortest wall time of work(0) … work(threads − 1) side by side, in seconds."""
    gate = threading.Barrier(threads)
    spans: list[list[tuple[float, float]]] = [[] for _ in range(REPEATS)]

    def serve(index: int) -> None:
        for span in spans:
            gate.wait()
            start = time.perf_counter()
            work(index)
            span.append((start, time.perf_counter()))

    team = [threading.Thread(target=serve, args=(index,)) for index in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return min(max(end for _, end in span) - min(start for start, _ in span) for span in spans)


def read_rate(size: int, threads: int) -> float:
    """Return the bytes a second that `threads` read from `size` bytes of memory."""
    libc = ctypes.CDLL(None)
    libc.memchr.restype = ctypes.c_void_p
    memory = np.full(size, 2, np.uint8)  # written, or every page would be the same one
    share = size // threads

    def read(index: int) -> None:
        libc.memchr(ctypes.c_void_p(memory.ctypes.data + index * share), 1, ctypes.c_size_t(share))

    return size / best_time(threads, read)


def shares(panels: int, threads: int) -> list[tuple[int, int]]:
    """Cut the panels into one range (first, count) for each thread."""
    edges = [panels * i // threads for i in range(threads + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


def product_time(weights: list[packed.Packed], rows: int, threads: int, *, wide: bool) -> float:
    """Return the seconds of one product with each of the matrices."""
    library, cols = weights[0].library, weights[0].cols
    parts = shares(weights[0].panels, threads)
    width = weights[0].panels * packed.PANEL
    out = packed.aligned(4 * rows * width).view(np.float32)
    values = np.random.default_rng(0).normal(size=(rows, cols)).astype(np.float32)
    x = packed.quantise(library, values)
    halves = packed.aligned(2 * values.size).view(np.uint16).reshape(values.shape)
    halves[:] = values.view(np.uint32) >> 16
    scratch = [packed.scratch(weights[0], GROUP) for _ in range(threads)]
    stride = ctypes.c_int64(width)

    def multiply(index: int) -> None:
        first, count = parts[index]
        for matrix in weights:
            if not wide:
                at = ctypes.c_void_p(out.ctypes.data + 4 * packed.PANEL * first)
                library.quaver_product(
                    matrix.handle, first, count, packed.pointer(x.buffer), rows, 0, rows, at, stride
                )
                continue
            for panel in range(first, first + count, GROUP):
                at = ctypes.c_void_p(out.ctypes.data + 4 * packed.PANEL * panel)
                now = min(GROUP, first + count - panel)
                library.quaver_wide_product(
                    matrix.handle, panel, now, packed.pointer(halves), rows, at, stride,
                    packed.pointer(scratch[index]),
                )  # fmt: skip

    return best_time(threads, multiply)


def filled(library: ctypes.CDLL, name: str, bits: int) -> list[packed.Packed]:
    """Return a shape's matrices with random weights."""
    outputs, inputs, count = SHAPES[name]
    kind, block = (packed.Q4_1, 20) if bits == 4 else (packed.Q8_0, 34)
    source = np.random.default_rng(0).integers(0, 256, (outputs, inputs // 32, block), dtype=np.uint8)
    source[..., :4] = np.float16([0.01, 0.01]).view(np.uint8)
    data = source.reshape(outputs, -1)
    return [packed.matrix(library, outputs, inputs, bits).pack(kind, data) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--isa", default=build.instruction_sets()[0])
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16, 32, 512])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--peak", type=float, help="GMAC/s of one core")
    options = parser.parse_args()

    library = open_library(options.isa, CACHE)
    print(
        f"{options.isa}; shape bits rows threads: milliseconds, "
        "GB/s (share of reading), GMAC/s (share of --peak)"
    )
    limits: dict[tuple[int, int], float] = {}
    for bits in options.bits:
        for name in options.shapes:
            weights = filled(library, name, bits)
            outputs, inputs, count = SHAPES[name]
            size = count * outputs * inputs * (5 if bits == 4 else 8.5) / 8
            for threads in options.threads:
                key = (int(size), threads)
                limits[key] = limits.get(key) or read_rate(*key)
                for rows in options.rows:
                    for wide in {False, rows >= 64 and bool(library.quaver_has_wide_product())}:
                        seconds = product_time(weights, rows, threads, wide=wide)
                        macs = count * outputs * inputs * rows / seconds
                        peak = f" ({macs / 1e9 / threads / options.peak:3.0%})" if options.peak else ""
                        print(
                            f"{name:8} {bits} {rows:4} {threads} {'bf16' if wide else 'int8'}: "
                            f"{seconds * 1e3:8.3f} ms "
                            f"{size / seconds / 1e9:6.1f} GB/s ({size / seconds / limits[key]:3.0%}) "
                            f"{macs / 1e9:7.1f} GMAC/s{peak}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
