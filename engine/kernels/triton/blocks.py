"""Block shapes by the shape of the work: the run-time switch between prefill and decode.

Few rows (decode) are bound by memory: small tiles, many of them, deep pipelines. Many rows
(prefill) are bound by arithmetic: tiles of 128 rows that fill the tensor cores.
"""

from __future__ import annotations

from math import ceil

from engine.kernels.triton.launch import Block

#: From this many rows on, work counts as prefill.
MANY_ROWS = 64

#: Rows of the smallest tile that a tensor core multiplies.
LEAST_ROWS = 16


def power(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`, itself a power of two."""
    return max(least, 1 << (count - 1).bit_length())


def row(width: int) -> Block:
    """One program a row of `width` elements: sixteen elements a thread, one to eight warps."""
    return Block(warps=min(8, max(1, power(width) // 512)), stages=1)


def attention(rows: int, groups: int, width: int, itemsize: int, processors: int) -> Block:
    """Tiles of `rows` (tokens × heads that share keys) by context, for heads of `width` elements."""
    if rows < MANY_ROWS:
        return Block(m=power(rows, LEAST_ROWS), n=32 if width * itemsize > 256 else 64, warps=4, stages=2)
    if itemsize == 4:  # three products for each: registers are what is short
        return Block(m=16 if width > 64 else 32, n=32, warps=4 if width > 64 else 8, stages=1)
    if width > 128:
        return Block(m=64, n=32, warps=8, stages=2)
    large = Block(m=128, n=32 if width > 64 else 64, warps=8, stages=2)
    small = Block(m=64, n=64, warps=8 if width > 64 else 4, stages=2)
    return large if ceil(rows / large.m) * groups >= processors else small


def splits(programs: int, context: int, tile: int, processors: int) -> int:
    """In how many parts to cut a context so that `programs` × parts keep two blocks a processor.

    Never more parts than tiles.
    """
    wanted = ceil(2 * processors / max(1, programs))
    return max(1, min(wanted, ceil(context / tile)))


def gemm(rows: int, outputs: int, pair: bool, itemsize: int, processors: int) -> Block:
    """Tiles of a product with weights [out, in]; `pair` keeps two accumulators (gate and up).

    The largest that still give every processor a tile; the smallest where none does.
    """
    if rows <= LEAST_ROWS:
        shapes = [Block(m=16, n=n, k=256 // itemsize, warps=4, stages=4) for n in (64, 32, 16)]
    elif rows < MANY_ROWS:
        shapes = [Block(m=power(rows), n=n, k=128 // itemsize, warps=4, stages=3) for n in (64, 32)]
    elif itemsize == 2:
        large = Block(m=128, n=64 if pair else 128, k=64, warps=8, stages=3)
        shapes = [large, Block(m=64, n=64, k=64, warps=4 if not pair else 8, stages=3)]
    else:
        shapes = [Block(m=64, n=32 if pair else 64, k=32, warps=8, stages=2)]
    for block in shapes:
        if ceil(rows / block.m) * ceil(outputs / block.n) >= processors:
            return block
    return shapes[-1]


def head(rows: int, itemsize: int) -> Block:
    """Tiles of the LM head: rows by vocabulary by hidden."""
    if rows <= LEAST_ROWS:
        return Block(m=16, n=128, k=64 // (itemsize // 2), warps=4, stages=3)
    if rows < MANY_ROWS:
        return Block(m=power(rows), n=128, k=64 // (itemsize // 2), warps=8, stages=3)
    return Block(m=64, n=128, k=32, warps=8, stages=3 if itemsize == 2 else 2)
