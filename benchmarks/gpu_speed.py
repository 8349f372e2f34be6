"""How fast a step is on this GPU: ours in fused kernels, the peer's, and what the card allows.

Weights are random at SmolLM2-135M's sizes: speed does not depend on what they say, and no file is
needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.graphs import CudaRecorder, Tensors
from engine.kernels import reference, triton
from engine.models.config import ModelConfig, weight_shapes
from engine.models.fused import Chunk, Fused, Watch, Work
from engine.models.llama import Llama
from engine.models.weights import stored

CONFIG = ModelConfig(
    name="SmolLM2-135M, random",
    architecture="llama",
    vocab=49152,
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    norm_eps=1e-5,
    rope_theta=100_000.0,
    max_context=8192,
    tied_embeddings=True,
    quantization="none",
    bos_id=None,
    eos_ids=(2,),
    add_bos=False,
)
PAGE = 16
CONTEXT = 512  # tokens behind each decode
PREFILLS = (512, 2048)
BATCHES = (1, 16, 64)
WATCHED = (*range(0, CONFIG.layers, 4), CONFIG.layers - 1)
DTYPE = torch.bfloat16


def seconds(work: Callable[[], Any], budget: float = 1.0) -> float:
    """Median wall time of `work`, the GPU waited for each time, in about `budget` seconds after a warm-up."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < budget:
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def limits(device: torch.device) -> dict[str, float]:
    """Measured: bytes/s of a copy (read and written) and operations/s of a bf16 product."""
    source = torch.empty(1 << 29, dtype=DTYPE, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size() / seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, dtype=DTYPE, device=device) for _ in range(2))
    return {"bytes_per_s": copied, "operations_per_s": 2 * 8192**3 / seconds(lambda: a @ b)}


class Ours:
    """The fused model with pages for 64 sequences."""

    def __init__(self, device: torch.device) -> None:
        source = torch.Generator().manual_seed(0)
        self.weights = {
            name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=source) * 0.02
            for name, shape in weight_shapes(CONFIG).items()
        }
        held = {name: stored(weight) for name, weight in self.weights.items()}
        self.device = device
        self.model = Fused(Llama(CONFIG, held, DTYPE, reference), triton, device)
        self.pages_each = max(PREFILLS) // PAGE
        shape = (CONFIG.layers, max(BATCHES) * self.pages_each, PAGE, CONFIG.kv_heads, CONFIG.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=DTYPE, device=device) for _ in range(2))
        self.graphs = self.model.graphs(self.keys, self.values, CudaRecorder())

    def prefill(self, tokens: Tensor, watched: bool) -> Any:
        """A step over one prompt [T]."""
        count = len(tokens)
        places = torch.arange(count, device=self.device)
        table = torch.arange(self.pages_each, device=self.device)[None]
        end = torch.tensor([count - 1], device=self.device)
        lengths = torch.tensor([count], device=self.device)
        none = places[:0]
        watch = Watch(WATCHED, end, table, lengths, lengths) if watched else None
        work = Work(tokens, places, places, table[:0], none, end, [Chunk(0, count, 0, table)], watch)
        return self.model.run(work, self.keys, self.values)

    def decode_inputs(self, batch: int, watched: bool) -> Tensors:
        """Tensors of a decode step at CONTEXT."""
        pages = -(-(CONTEXT + 1) // PAGE)
        row = torch.arange(batch, device=self.device)
        table = row[:, None] * self.pages_each + torch.arange(pages, device=self.device)
        positions = torch.full((batch,), CONTEXT, device=self.device)
        return {
            "tokens": row + 5,
            "positions": positions,
            "slots": table[:, -1] * PAGE + CONTEXT % PAGE,
            "table": table,
            "lengths": positions + 1,
            "places": row if watched else row[:0],
            "prompt_lengths": (positions if watched else positions[:0]) // 2,
        }

    def decode(self, inputs: Tensors) -> Any:
        """The step launched kernel by kernel."""
        watch = None
        if len(inputs["places"]):
            watch = Watch(
                WATCHED, inputs["places"], inputs["table"], inputs["lengths"], inputs["prompt_lengths"]
            )
        work = Work(
            inputs["tokens"],
            inputs["positions"],
            inputs["slots"],
            inputs["table"],
            inputs["lengths"],
            watch=watch,
        )
        return self.model.run(work, self.keys, self.values)


class Peer:
    """transformers with the same weights: SDPA, or with attentions and hidden states eager attention."""

    def __init__(self, weights: dict[str, Tensor], device: torch.device, *, watched: bool) -> None:
        import transformers  # noqa: PLC0415  seconds to import, and only this needs it

        self.transformers: Any = transformers
        self.watched = watched
        self.device = device
        config = self.transformers.LlamaConfig(
            vocab_size=CONFIG.vocab,
            hidden_size=CONFIG.hidden,
            intermediate_size=CONFIG.intermediate,
            num_hidden_layers=CONFIG.layers,
            num_attention_heads=CONFIG.heads,
            num_key_value_heads=CONFIG.kv_heads,
            head_dim=CONFIG.head_dim,
            rms_norm_eps=CONFIG.norm_eps,
            max_position_embeddings=CONFIG.max_context,
            rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
            tie_word_embeddings=True,
            attn_implementation="eager" if watched else "sdpa",
        )
        self.model = self.transformers.LlamaForCausalLM(config).eval()
        self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()
        self.model.to(device, DTYPE)

    @torch.inference_mode()
    def step(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Logits of the last position of `tokens` [B, T] after `cache`, which grows."""
        found = self.model(
            tokens,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            output_attentions=self.watched,
            output_hidden_states=self.watched,
        )
        if self.watched:
            for layer in WATCHED:
                self._detail(found, layer)
        logits: Tensor = found.logits[:, -1]
        return logits

    def _detail(self, found: Any, layer: int) -> tuple[Tensor, Tensor]:
        """Lens entropy [B] and head KL [B, H] of one layer at the last position."""
        hidden = found.hidden_states[layer + 1][:, -1]
        if layer < CONFIG.layers - 1:  # the last one has its norm already
            hidden = self.model.model.norm(hidden)
        z = F.linear(hidden, self.model.lm_head.weight).float()
        log_p = z.log_softmax(-1)
        p = found.attentions[layer][:, :, -1].float()
        mean = p.mean(1, keepdim=True)
        return -(log_p.exp() * log_p).sum(-1), torch.where(p > 0, p * (p.log() - mean.log()), 0).sum(-1)

    def cache(self, batch: int) -> Any:
        """A cache of CONTEXT tokens."""
        cache = self.transformers.DynamicCache()
        with torch.inference_mode():
            tokens = torch.randint(CONFIG.vocab, (batch, CONTEXT), device=self.device)
            self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def decode_seconds(self, batch: int) -> float:
        """Median seconds of a decode step; the cache is cut back after each so that all see CONTEXT."""
        cache = self.cache(batch)
        tokens = torch.full((batch, 1), 5, device=self.device)

        def step() -> None:
            self.step(tokens, cache)
            cache.crop(-1)

        return seconds(step)


def agreement(ours: Ours, peer: Peer) -> float:
    """Largest difference of the top logits of a prompt between ours and the peer, over their spread."""
    tokens = torch.randint(CONFIG.vocab, (min(PREFILLS) // 2 + 1,), device=ours.device)
    expected = peer.step(tokens[None])[0].float()
    found = ours.prefill(tokens, watched=False).rows
    difference = found.top_logits[0] - expected[found.top_tokens[0]]
    return float(difference.abs().max() / expected.std())


def rows(device: torch.device, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure everything; ready for JSON. Times in seconds, speeds in tokens/s."""
    allowed = limits(device)
    copies, multiplies = allowed["bytes_per_s"] / 1e9, allowed["operations_per_s"] / 1e12
    report(f"copies {copies:.0f} GB/s, multiplies {multiplies:.0f} T/s")
    ours = Ours(device)
    peers = {watched: Peer(ours.weights, device, watched=watched) for watched in (False, True)}
    agreed = agreement(ours, peers[False])
    report(f"top logits differ from transformers' by {agreed:.3f} of their spread")
    found: list[dict[str, Any]] = []
    graphs: list[dict[str, Any]] = []
    layer_weights = sum(w.numel() for n, w in ours.weights.items() if "layers" in n)
    for watched in (False, True):
        for count in PREFILLS:
            tokens = torch.randint(CONFIG.vocab, (count,), device=device)
            mine = seconds(lambda t=tokens, w=watched: ours.prefill(t, w))  # type: ignore[misc]
            theirs = seconds(lambda t=tokens, w=watched: peers[w].step(t[None]))  # type: ignore[misc]
            attention = 2 * CONFIG.layers * CONFIG.heads * CONFIG.head_dim * count * count
            least = (2 * layer_weights * count + attention) / allowed["operations_per_s"]
            times = {"eager": mine, "best": mine, "theirs": theirs, "least": least}
            found.append(_row(f"prefill {count}", watched, tokens=count, **times))
            report(_line(found[-1]))
        for batch in BATCHES:
            inputs = ours.decode_inputs(batch, watched)
            eager = seconds(lambda i=inputs: ours.decode(i))  # type: ignore[misc]
            graphs.append(_instance(ours, inputs, batch, watched))
            replayed = seconds(lambda i=inputs: ours.graphs(i, WATCHED))  # type: ignore[misc]
            theirs = peers[watched].decode_seconds(batch)
            cached = 4 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * CONTEXT * batch
            least = (2 * layer_weights + 4 * CONFIG.vocab * CONFIG.hidden + cached) / allowed["bytes_per_s"]
            times = {"eager": eager, "best": replayed, "theirs": theirs, "least": least}
            found.append(_row(f"decode batch {batch}", watched, tokens=batch, **times))
            report(_line(found[-1]))
    return {"limits": allowed, "agreement": agreed, "rows": found, "graphs": graphs}


def _instance(ours: Ours, inputs: Tensors, batch: int, watched: bool) -> dict[str, Any]:
    """Time and memory of making one recording; its kernels are compiled already."""
    torch.cuda.synchronize()
    before, began = torch.cuda.memory_reserved(), time.perf_counter()
    ours.graphs(inputs, WATCHED)
    torch.cuda.synchronize()
    return {
        "batch": batch,
        "signals": watched,
        "first_s": time.perf_counter() - began,
        "reserved_bytes": torch.cuda.memory_reserved() - before,
    }


def _row(
    name: str, watched: bool, *, tokens: int, eager: float, best: float, theirs: float, least: float
) -> dict[str, Any]:
    return {
        "row": name,
        "signals": watched,
        "ours_tokens_per_s": tokens / best,
        "without_graphs_tokens_per_s": tokens / eager,
        "transformers_tokens_per_s": tokens / theirs,
        "ratio": theirs / best,
        "limit_share": least / best,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['row']:16} signals {'on ' if row['signals'] else 'off'} "
        f"ours {row['ours_tokens_per_s']:10.0f} (without graphs {row['without_graphs_tokens_per_s']:10.0f}) "
        f"transformers {row['transformers_tokens_per_s']:10.0f} tokens/s, ratio {row['ratio']:.2f}, "
        f"{row['limit_share']:.0%} of the limit"
    )
