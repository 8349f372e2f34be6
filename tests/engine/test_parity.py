"""The engine against the peer implementation, on the same weights in fp32, position by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import kernels
from engine.core import Engine
from engine.kv.pages import PagePool
from engine.messages import RequestMeta, SamplingParams, Submit
from engine.models.llama import Llama
from engine.models.loader import LoadedModel, load
from engine.models.rotary import llama3_divisors
from engine.models.step import Batch
from engine.settings import EngineSettings
from engine.text import TextStream
from tests.engine.conftest import FAMILIES

PAGE = 16
PROMPTS = (
    "What is the capital of France?",
    "According to the passage, the bridge opened in 1894 and carries 40 000 people a day. When did it open?",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Liste drei Städte am Rhein. 日本語も少し. Ω≈π²/6 🎵",
)


def logits_of(model: Llama, ids: list[int], prefilled: int) -> Tensor:
    """Logits [T, V] of every position: `prefilled` at once in two chunks, the rest one by one."""
    config = model.config
    pages = -(-len(ids) // PAGE)
    pool = PagePool(
        layers=config.layers,
        pages=pages,
        page_size=PAGE,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
    )
    table = pool.take(pages)
    half = max(1, prefilled // 2)
    spans = [(0, half), (half, prefilled), *((i, i + 1) for i in range(prefilled, len(ids)))]
    return torch.cat([step(model, pool, ids, span, table) for span in spans if span[0] < span[1]])


def step(model: Llama, pool: PagePool, ids: list[int], span: tuple[int, int], table: list[int]) -> Tensor:
    positions = np.arange(*span)
    batch = Batch(
        tokens=np.array(ids[slice(*span)], np.int32),
        slots=np.array(table)[positions // PAGE] * PAGE + positions % PAGE,
        offsets=np.array([0], np.int32),
        counts=np.array([len(positions)], np.int32),
        starts=np.array([span[0]], np.int32),
        tables=np.array([table], np.int32),
        rows=np.arange(len(positions), dtype=np.int32),
    )
    return model.step(batch, pool, list(range(len(positions)))).logits


def peer_of(loaded: LoadedModel) -> Any:
    """The peer's model with the same config and the very same weights."""
    import transformers

    config = loaded.config
    weights = {name: weight.tensor() for name, weight in loaded.weights.items()}
    peer = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=config.max_context,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied_embeddings,
            attn_implementation="eager",
        )
    ).eval()
    missing, unexpected = peer.load_state_dict(weights, strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"} if config.tied_embeddings else set(), [])
    peer.tie_weights()
    return peer


def runnable(loaded: LoadedModel) -> Llama:
    return Llama(loaded.config, loaded.weights, torch.float32, kernels.load("reference"))


@pytest.fixture(scope="module")
def real(smollm: Path) -> LoadedModel:
    return load(smollm)


@pytest.fixture(scope="module")
def peer(real: LoadedModel) -> Any:
    return peer_of(real)


@pytest.mark.model
def test_logits_of_the_real_model(real, peer, record_property, capsys):
    model = runnable(real)
    agreed = positions = 0
    worst = 0.0
    for prompt in PROMPTS:
        ids = real.tokenizer.encode_prompt(real.tokenizer.chat([{"role": "user", "content": prompt}]))
        with torch.inference_mode():
            expected = peer(torch.tensor([ids])).logits[0]
        ours = logits_of(model, ids, prefilled=len(ids) - 8)
        agreed += int((ours.argmax(-1) == expected.argmax(-1)).sum())
        positions += len(ids)
        worst = max(worst, float((ours - expected).abs().max()))
    record_property("top1_agreement", agreed / positions)
    record_property("max_abs_logit_error", worst)
    with capsys.disabled():
        print(f"\ntop-1 agreement {agreed}/{positions}, largest logit error {worst:.2e}")
    assert agreed / positions >= 0.999
    assert worst < 1e-2


@pytest.mark.model
def test_greedy_answer_of_the_real_model(real, peer):
    """Token for token the peer's greedy answer, and it is Paris."""
    ids = real.tokenizer.encode_prompt(
        real.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    )
    tokens = generate(runnable(real), ids, max_tokens=24)
    stream = TextStream(real.tokenizer, [])
    assert "Paris" in stream.push(tokens) + stream.finish()
    with torch.inference_mode():
        logits = peer(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens
    assert tokens[-1] in real.config.eos_ids


@pytest.mark.model
def test_prefilled_answer_of_the_real_model(real):
    messages = [
        {"role": "user", "content": "Passage: Ada keeps the lamp in the attic.\nWhere is the lamp?"},
        {"role": "assistant", "content": "According to the passage, the lamp is in the"},
    ]
    ids = real.tokenizer.encode_prompt(real.tokenizer.chat(messages))
    text = real.tokenizer.decode(generate(runnable(real), ids, max_tokens=3))
    assert text.startswith(" attic")


def generate(model: Llama, ids: list[int], max_tokens: int) -> list[int]:
    engine = Engine(model, EngineSettings(kv_tokens=1024, signal_budget=0))
    engine.submit(
        Submit(
            meta=RequestMeta(request_id="r"),
            token_ids=ids,
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        )
    )
    tokens: list[int] = []
    while engine.has_work:
        tokens += torch.frombuffer(bytearray(engine.step().token_ids or b"\0"), dtype=torch.int32).tolist()
    engine.check()
    return tokens


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("groups", [(4, 4, 16), (4, 2, 16), (8, 2, 16), (4, 1, 32)])
def test_logits_of_random_folders(write_folder, tied, groups):
    heads, kv_heads, width = groups
    folder, peer = write_folder(
        tie_word_embeddings=tied, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width
    )
    compare(load(folder), peer)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_random_folders_of_each_family(write_folder, family, tied):
    folder, peer = write_folder(family=family, tie_word_embeddings=tied)
    compare(load(folder), peer)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_random_gguf_files_of_each_family(write_gguf, family, tied):
    path, peer = write_gguf(family=family, tie_word_embeddings=tied)
    compare(load(path), peer)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_each_family(write_gguf, family):
    path, peer = write_gguf(family=family)
    prompt = list(range(5, 28))
    tokens = generate(runnable(load(path)), prompt, max_tokens=40)
    with torch.inference_mode():
        expected = peer.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=[2, 0], pad_token_id=2
        )
    assert len(tokens) > 5
    assert tokens == expected[0, len(prompt) :].tolist()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_logits_of_a_folder_with_stretched_rotary_positions(write_folder):
    folder, peer = write_folder(rope_parameters=LLAMA3)
    loaded = load(folder)
    divisors = loaded.config.rope_divisors
    assert divisors is not None
    assert divisors[0] == 1.0 < divisors[1] < divisors[2] == 8.0, "all three ranges"
    compare(loaded, peer)


def test_logits_of_a_gguf_file_with_stretched_rotary_positions(write_gguf):
    """Converters write the divisors themselves."""
    divisors = llama3_divisors(5000.0, 16, LLAMA3)
    path, peer = write_gguf(
        rope_parameters=LLAMA3, extra={"rope_freqs.weight": np.array(divisors, np.float32)}
    )
    compare(load(path), peer)


def test_a_window_changes_what_is_seen(write_gguf):
    """The parity above would not notice a peer that ignores its window too."""
    ids = list(range(5, 45))
    near, far = (
        logits_of(runnable(load(write_gguf(family="mistral", sliding_window=window)[0])), ids, 20)
        for window in (11, None)
    )
    assert torch.allclose(near[:11], far[:11], atol=1e-4)
    assert not torch.allclose(near[11:], far[11:], atol=0.1)


def compare(loaded: LoadedModel, peer: Any) -> None:
    ids = torch.randint(loaded.config.vocab, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        expected = peer(torch.tensor([ids])).logits[0]
    ours = logits_of(runnable(loaded), ids, prefilled=37)
    assert expected.std() > 0.5, "logits of a size that could disagree"
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))
