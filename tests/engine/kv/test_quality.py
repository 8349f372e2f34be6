"""What the real model loses when half of what it has read has been a block."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.text import WINDOW, Text
from engine import kernels
from engine.kv.int8 import BlockLayout, pack, unpack
from engine.kv.pages import PagePool
from engine.models.llama import Llama
from engine.models.loader import load
from tests.engine.test_parity import step

PAGE, BLOCK_PAGES, WINDOWS = 16, 4, 6


@pytest.mark.model
@torch.inference_mode()
def test_perplexity_after_a_first_half_from_blocks(smollm: Path, record_property, capsys) -> None:
    loaded = load(smollm)
    config = loaded.config
    model = Llama(config, loaded.weights, torch.float32, kernels.load("reference"))
    sizes = {"layers": config.layers, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    pool = PagePool(**sizes, pages=WINDOW // PAGE, page_size=PAGE, dtype=torch.float32)
    layout = BlockLayout(**sizes, tokens=PAGE * BLOCK_PAGES)
    table, half = pool.take(pool.pages), WINDOW // 2
    block = np.empty(layout.size, np.uint8)

    def loss(ids: list[int]) -> float:
        """Mean surprisal in nats of the second half's tokens."""
        logits = step(model, pool, ids, (half, WINDOW), table)[:-1]
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[half + 1 :])))

    plain, packed = [], []
    for ids in Text.read(loaded.tokenizer).windows(WINDOWS):
        step(model, pool, ids, (0, half), table)
        plain.append(loss(ids))
        for at in range(0, half // PAGE, BLOCK_PAGES):
            pages = table[at : at + BLOCK_PAGES]
            assert pack(pool, pages, layout, block)
            assert unpack(pool, block, pages, layout).all()
        packed.append(loss(ids))
    rise = math.exp(np.mean(packed) - np.mean(plain)) - 1
    record_property("perplexity_rise", rise)
    with capsys.disabled():
        print(f"\nperplexity {math.exp(np.mean(plain)):.3f}, through blocks {rise:+.4%}")
    assert packed != plain
    assert rise <= 0.005
