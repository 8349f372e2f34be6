"""What the machine allows: read bandwidth and arithmetic, measured, and what a step needs of them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from engine.models.config import ModelConfig

#: Sizes of the buffers that are read, in MB. The largest is what the issue calls the limit; smaller ones
#: show how much of a model the caches can hold.
SIZES_MB = (32, 64, 96, 128, 192, 256, 1024)
_KV_BYTES = 2  # a key or value element, with every engine here


@dataclass(frozen=True)
class Limits:
    """Reading in bytes per second by the size of what is read again and again; arithmetic in
    operations (multiplications and additions) per second of the fastest type."""

    read: dict[int, float]  # MB → bytes/s
    bf16: float
    int8: float

    @property
    def fastest(self) -> float:
        """Operations per second of the type that this machine multiplies fastest."""
        return max(self.bf16, self.int8)

    def best_of(self, other: Limits) -> Limits:
        """Return the higher of both, figure by figure: what disturbed one measurement lowered it."""
        read = {size: max(rate, other.read[size]) for size, rate in self.read.items()}
        return Limits(read, max(self.bf16, other.bf16), max(self.int8, other.int8))

    def bandwidth(self, working_set: float) -> float:
        """Bytes per second when `working_set` bytes are read again and again: the nearest measured
        size that is not larger, so that the limit is never too low."""
        fitting = [size for size in self.read if size * 1e6 <= working_set]
        return self.read[max(fitting)] if fitting else max(self.read.values())


@dataclass(frozen=True)
class Need:
    """What one call of a model must read and compute at the least."""

    bytes: float
    operations: float

    def seconds(self, limits: Limits, arithmetic: float) -> float:
        """The least time that the machine's limits leave for it, if reading and computing overlap."""
        return max(self.bytes / limits.bandwidth(self.bytes), self.operations / arithmetic)


def measure(threads: int, seconds: float = 0.25) -> Limits:
    """Measure with `threads` threads, about `seconds` for each of nine figures; the best of many runs."""
    read = {}
    buffer = np.ones(max(SIZES_MB) * 1_000_000, np.uint8)
    with ThreadPoolExecutor(threads) as pool:
        for size in SIZES_MB:
            count = size * 1_000_000

            def sweep(count: int = count) -> None:
                _read(buffer, count, threads, pool)

            read[size] = count / best(sweep, seconds)
    torch.set_num_threads(threads)
    plain = torch.randn(2048, 2048).bfloat16()
    whole = torch.randint(-100, 100, (2048, 2048), dtype=torch.int8)
    operations = 2 * 2048**3
    return Limits(
        read,
        bf16=operations / best(lambda: plain @ plain, seconds),
        int8=operations / best(lambda: torch._int_mm(whole, whole), seconds),
    )


def weights_of(config: ModelConfig, layer_bits: float, head_bits: float) -> float:
    """Bytes of weights that one step reads: all layers and the LM head, at so many bits a weight."""
    return (_layer_weights(config) * layer_bits + config.vocab * config.hidden * head_bits) / 8


def decode(config: ModelConfig, weight_bytes: float, batch: int, context: int) -> Need:
    """One token for each of `batch` sequences of `context` tokens."""
    cached = 2 * config.layers * config.kv_heads * config.head_dim * context
    attention = 4 * config.layers * config.heads * config.head_dim * context
    weights = _layer_weights(config) + config.vocab * config.hidden
    return Need(weight_bytes + batch * cached * _KV_BYTES, batch * (2 * weights + attention))


def prefill(config: ModelConfig, weight_bytes: float, tokens: int) -> Need:
    """A prompt of `tokens`, causal, with logits of the last one."""
    attention = 4 * config.layers * config.heads * config.head_dim * tokens * (tokens + 1) / 2
    head = 2 * config.vocab * config.hidden
    return Need(weight_bytes, 2 * _layer_weights(config) * tokens + attention + head)


def _layer_weights(config: ModelConfig) -> int:
    queries = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    attention = config.hidden * (2 * queries + 2 * keys)
    return config.layers * (attention + 3 * config.hidden * config.intermediate)


_search = ctypes.CDLL(None).memchr
_search.restype = ctypes.c_void_p
_search.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def _read(buffer: np.ndarray, count: int, threads: int, pool: ThreadPoolExecutor) -> None:
    """Have the C library look for a byte that is not there: a pure read, without the interpreter's lock."""
    share = count // threads
    start = buffer.ctypes.data
    for found in pool.map(lambda i: _search(start + i * share, 0, share), range(threads)):
        assert found is None


def best(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest time that `work` took in about `seconds` of repetitions, five at least."""
    best, began, runs = float("inf"), time.perf_counter(), 0
    while runs < 5 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best
