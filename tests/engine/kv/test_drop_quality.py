"""What the real model loses with the tokens that blocks leave out: perplexity, and facts it is asked for."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.text import Text
from engine.core import Engine, load_engine
from engine.kv.drop import DropPolicy
from engine.kv.int8 import pack, unpack
from engine.kv.pages import BLOCK_PAGES, PagePool
from engine.messages import RequestMeta, SamplingParams, Submit
from engine.models.loader import load_tokenizer
from engine.models.step import Batch, Output
from engine.settings import EngineSettings
from engine.tokenizer import Tokenizer
from tests.engine.kv.test_tiers import push_out

PAGE, READ, LENGTH, TEXTS, FACTS = 16, 1024, 1536, 4, 8
THIRD = DropPolicy(most=0.33, short=1, long=2, spread=3.0, close=2.0)  # of every prompt
POLICIES = {"none": DropPolicy(0.0), "up to half": DropPolicy(0.5), "a third": THIRD}
NAMES = ("Ada", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo")


@pytest.fixture(scope="module")
def real(smollm: Path) -> Engine:
    settings = EngineSettings(
        model=str(smollm), kv_tokens=4096, kv_host_mb=64, kv_drop=0.5, signal_budget=0.0, page_size=PAGE
    )
    return load_engine(settings)


@pytest.fixture(scope="module")
def tokenizer(smollm: Path) -> Tokenizer:
    return load_tokenizer(smollm)


@pytest.mark.model
def test_perplexity_after_two_thirds_from_blocks(
    real: Engine, tokenizer: Tokenizer, record_property, capsys
) -> None:
    """Of 1,536 tokens the first 1,024 are packed and unpacked before the others are read."""
    tokens = Text.read(tokenizer).tokens
    config, layout = real.model.config, real.tiers.layout
    sizes = {"layers": config.layers, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    pool = PagePool(**sizes, pages=LENGTH // PAGE, page_size=PAGE, dtype=real.model.dtype)
    table = np.array([pool.take(pool.pages)], np.int32)

    def step(ids: list[int], start: int, end: int) -> Output:
        positions = np.arange(start, end)
        batch = Batch(
            tokens=np.array(ids[start:end], np.int32),
            slots=table[0][positions // PAGE] * np.int64(PAGE) + positions % PAGE,
            offsets=np.zeros(1, np.int32),
            counts=np.array([end - start], np.int32),
            starts=np.array([start], np.int32),
            tables=table,
            rows=np.arange(end - start, dtype=np.int32),
            scored=np.array([READ - THIRD.window], np.int32),
        )
        return real.model.step(batch, pool, list(range(end - start)) if start else [])

    def loss(ids: list[int]) -> float:
        logits = step(ids, READ, LENGTH).logits[:-1]
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[READ + 1 :])))

    def through_blocks(keep: NDArray[np.bool_]) -> int:
        size = 0
        for at in range(0, READ // PAGE, BLOCK_PAGES):
            own = table[0][at : at + BLOCK_PAGES]
            mine = keep[at * PAGE : (at + BLOCK_PAGES) * PAGE]
            block = np.empty(layout.partial_size(int(mine.sum())), np.uint8)
            assert pack(pool, own, layout, block, keep=mine)
            pool.dead[own] = ~unpack(pool, block, own, layout).reshape(BLOCK_PAGES, PAGE)
            size += block.size
        return size

    plain: list[float] = []
    losses: dict[str, list[float]] = {name: [] for name in POLICIES}
    sizes_of: dict[str, int] = dict.fromkeys(POLICIES, 0)
    for start in range(0, TEXTS * LENGTH, LENGTH):
        ids = tokens[start : start + LENGTH]
        pool.dead[:] = False
        mass = step(ids, 0, READ).mass[0]
        whole = pool.keys.clone(), pool.values.clone()
        plain.append(loss(ids))
        for name, policy in POLICIES.items():
            pool.dead[:] = False
            pool.keys.copy_(whole[0])
            pool.values.copy_(whole[1])
            judgement = policy.judge(mass)
            assert judgement is not None
            sizes_of[name] += through_blocks(judgement.keep)
            losses[name].append(loss(ids))
    rises = {name: math.exp(np.mean(found) - np.mean(plain)) - 1 for name, found in losses.items()}
    ratios = {name: size / (TEXTS * READ * pool.token_bytes) for name, size in sizes_of.items()}
    with capsys.disabled():
        print(f"\nperplexity {math.exp(np.mean(plain)):.2f}; dropped: bytes ÷ bf16, perplexity")
        for name, rise in rises.items():
            record_property(f"perplexity_rise_{name}", rise)
            print(f"  {name}: {ratios[name]:.3f}, {rise:+.2%}")
    assert rises["none"] < 0.005
    assert ratios["a third"] <= 0.35 < ratios["up to half"] < ratios["none"] <= 0.53
    assert max(rises.values()) < 0.10


@pytest.mark.model
def test_facts_that_an_earlier_prompt_has_not_asked_for(
    real: Engine, tokenizer: Tokenizer, record_property, capsys
) -> None:
    """One prompt's blocks answer another question about the same text, with a code somewhere in it."""
    found = dict.fromkeys(POLICIES, 0)
    for number in range(FACTS):
        code, first, second = fact(tokenizer, number)
        for name, policy in POLICIES.items():
            while real.tiers.tiers[0].store.evict():
                pass
            real.tiers.drop = policy
            answer(real, first, 1)
            push_out(real)
            tokens = answer(real, second, 16)
            found[name] += code in tokenizer.decode(tokens)
            push_out(real)
    with capsys.disabled():
        print(f"\nfacts found of {FACTS}: {found}")
    record_property("facts_found", found)
    assert found["none"] >= FACTS - 1
    assert found["up to half"] >= FACTS // 2


def fact(tokenizer: Tokenizer, number: int) -> tuple[str, list[int], list[int]]:
    """A code, and two prompts about the text that it is in: only the second asks for it."""
    source, tokens = random.Random(number), Text.read(tokenizer).tokens
    code, name, start = str(source.randrange(1000, 9999)), NAMES[number % len(NAMES)], number * 331
    place = start + int(700 * source.uniform(0.1, 0.6))
    before, after = tokenizer.decode(tokens[start:place]), tokenizer.decode(tokens[place : start + 700])
    text = f"{before}\n\nThe secret code of {name} is {code}.\n\n{after}\n\n"
    first, second = (
        tokenizer.encode_prompt(tokenizer.chat([{"role": "user", "content": text + question}]))
        for question in ("What is this text about?", f"What is the secret code of {name}?")
    )
    return code, first, second


def answer(target: Engine, prompt: list[int], count: int) -> list[int]:
    target.submit(
        Submit(
            meta=RequestMeta(request_id="a"),
            token_ids=prompt,
            params=SamplingParams(max_tokens=count),
            cache_salt=b"s" * 16,
        )
    )
    tokens: list[int] = []
    while target.has_work:
        tokens += np.frombuffer(target.step().token_ids, np.int32).tolist()
    target.check()
    return tokens
