"""A model on the native CPU kernels: one call a step, weights held in 4 or 8 bits.

Matrices whose file has blocks of 32 in 4 or 8 bits are kept as they are; anything else is quantised
while it is packed. Decode products take activations in 8 bits with a scale for each block of 32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cpu import library
from engine.kernels.cpu.library import KINDS, PARTS
from engine.kv.pages import PagePool
from engine.models import rotary
from engine.models.config import ModelConfig
from engine.models.step import SCORED_LAYERS, Batch, Floats, LayerDetail, Output
from engine.models.weights import StoredWeight

BLOCK, LANES = 32, 16
SIGNALS = 5

#: Matrices of a layer: part, and the names whose rows follow each other in it.
_MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate": ("mlp.gate_proj",),
    "up": ("mlp.up_proj",),
    "down": ("mlp.down_proj",),
}
_VECTORS = {
    "attention_norm": ("input_layernorm.weight",),
    "feed_forward_norm": ("post_attention_layernorm.weight",),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
}


def fits(config: ModelConfig) -> bool:
    """Whether the native kernels take a model of these sizes."""
    inputs = (config.hidden, config.intermediate, config.heads * config.head_dim)
    return all(size % BLOCK == 0 for size in inputs) and config.head_dim % LANES == 0


class NativeLlama:
    """Weights of one model, packed for the native kernels. One step at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, StoredWeight],
        kernels: ctypes.CDLL,
        *,
        name: str,
        bits: int,
        threads: int,
        positions: int,
        compensation: float = 0.0,
    ) -> None:
        self.name = name
        self.config = config
        self.drops = True
        self.dtype = torch.bfloat16
        self.device = torch.device("cpu")
        self.ops = NativeOps(kernels, self)
        self.kernels = kernels
        self._head_seconds: dict[int, float] = {}
        self._no_logits = torch.empty((0, config.vocab))
        cos, sin = rotary.tables(config, positions)
        sizes = library.Config(
            vocab=config.vocab,
            hidden=config.hidden,
            layers=config.layers,
            heads=config.heads,
            groups=config.kv_heads,
            width=config.head_dim,
            intermediate=config.intermediate,
            positions=positions,
            window=config.sliding_window or 0,
            bits=bits,
            head_bits=8,
            tied=config.tied_embeddings,
            threads=threads,
            norm_eps=config.norm_eps,
            compensation=compensation,
        )
        self.handle = kernels.quaver_model_create(ctypes.byref(sizes), cos.data_ptr(), sin.data_ptr())
        if not self.handle:
            raise MemoryError(
                f"{config.name} does not fit into memory, has sizes the kernels do not take, or {threads} "
                "threads are more than the machine lends (QUAVER_THREADS)"
            )
        self._pack(weights)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.kernels.quaver_model_destroy(self.handle)

    def step(self, batch: Batch, pool: PagePool, keep: list[int]) -> Output:
        """Compute a batch and write its keys and values; the rows `keep` keep their logits."""
        rows = len(batch.rows)
        statistics = np.empty(rows, library.ROW)
        logits = torch.empty((len(keep), self.config.vocab)) if keep else self._no_logits
        kept = np.zeros(rows, np.uint64)
        kept[keep] = logits.data_ptr() + np.arange(len(keep), dtype=np.uint64) * (4 * self.config.vocab)
        layers, spans, prompts = _detail(batch)
        lens = np.empty((len(spans), len(layers)), np.float32)
        heads = np.empty((len(spans), SIGNALS, len(layers), self.config.heads), np.float32)
        mass, places = _mass(batch)
        hidden = torch.empty((rows, self.config.hidden)) if batch.hidden else None
        asked = library.Batch(
            tokens=len(batch.tokens),
            spans=len(batch.counts),
            table_width=batch.tables.shape[1],
            rows=rows,
            details=len(spans),
            layers=len(layers),
            token_ids=batch.tokens.ctypes.data,
            slots=batch.slots.ctypes.data,
            offset=batch.offsets.ctypes.data,
            count=batch.counts.ctypes.data,
            start=batch.starts.ctypes.data,
            tables=batch.tables.ctypes.data,
            row_tokens=batch.rows.ctypes.data,
            detail_spans=spans.ctypes.data,
            prompt_lengths=prompts.ctypes.data,
            detail_layers=layers.ctypes.data,
            keys=pool.keys.data_ptr(),
            values=pool.values.data_ptr(),
            layer_stride=pool.keys.stride(0),
            page_size=pool.page_size,
            scored_layers=SCORED_LAYERS,
            scored=batch.scored.ctypes.data if batch.scored is not None else None,
            dead=pool.dead.ctypes.data if pool.dead.any() else None,
        )
        answer = library.Outputs(
            rows=statistics.ctypes.data,
            keep=kept.ctypes.data if keep else None,
            lens_entropy=lens.ctypes.data,
            heads=heads.ctypes.data,
            mass=places.ctypes.data if mass else None,
            hidden=None if hidden is None else hidden.data_ptr(),
        )
        if self.kernels.quaver_step(self.handle, ctypes.byref(asked), ctypes.byref(answer)):
            raise MemoryError(f"no memory for a step of {len(batch.tokens)} tokens")
        seconds = self._lens_seconds(rows, len(spans) * len(layers), answer.head_seconds)
        return Output(
            lse=statistics["lse"],
            entropy=statistics["entropy"],
            ids=statistics["ids"],
            values=statistics["values"],
            kept=keep,
            logits=logits,
            detail=LayerDetail(lens, heads, answer.detail_seconds + seconds) if len(spans) else None,
            mass=mass,
            hidden=hidden,
        )

    def head(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [R, vocab] of hidden states [R, hidden] as `Output` has them."""
        states = hidden.float().contiguous()
        logits = torch.empty((len(states), self.config.vocab))
        if self.kernels.quaver_head(self.handle, states.data_ptr(), len(states), logits.data_ptr()):
            raise MemoryError(f"no memory for the LM head of {len(states)} rows")
        return logits

    def _lens_seconds(self, rows: int, lens_rows: int, seconds: float) -> float:
        """What the LM head took beyond what it takes for `rows` rows alone, by its own record."""
        usual = self._head_seconds.get(rows)
        if not lens_rows:
            self._head_seconds[rows] = seconds if usual is None else usual + 0.1 * (seconds - usual)
            return 0.0
        # Before a step without lens rows was seen: their share of the rows, which is too much.
        return seconds * lens_rows / (rows + lens_rows) if usual is None else max(seconds - usual, 0.0)

    def _pack(self, weights: Mapping[str, StoredWeight]) -> None:
        self._set_matrix(0, "embedding", [weights["model.embed_tokens.weight"]])
        if not self.config.tied_embeddings:
            self._set_matrix(0, "head", [weights["lm_head.weight"]])
        self._set_vector(0, "final_norm", [weights["model.norm.weight"]])
        for layer in range(self.config.layers):
            prefix = f"model.layers.{layer}."
            for part, names in _MATRICES.items():
                self._set_matrix(layer, part, [weights[f"{prefix}{name}.weight"] for name in names])
            for part, names in _VECTORS.items():
                found = [weights[prefix + name] for name in names if prefix + name in weights]
                if found:
                    self._set_vector(layer, part, found)

    def _set_matrix(self, layer: int, part: str, pieces: list[StoredWeight]) -> None:
        first = 0
        for piece in pieces:
            kind, data = piece.kind, np.ascontiguousarray(piece.data)
            if kind not in KINDS:
                kind, data = "F32", piece.tensor().contiguous().numpy()
            count = piece.shape[0]
            self.kernels.quaver_model_matrix(
                self.handle, layer, PARTS.index(part), first, count, KINDS.index(kind), data.ctypes.data
            )
            first += count

    def _set_vector(self, layer: int, part: str, pieces: list[StoredWeight]) -> None:
        values = torch.cat([piece.tensor().flatten() for piece in pieces])
        self.kernels.quaver_model_vector(
            self.handle, layer, PARTS.index(part), values.data_ptr(), values.numel()
        )


class NativeOps:
    """What an engine asks of rows whose logits were kept; as in `engine.kernels.reference`."""

    def __init__(self, kernels: ctypes.CDLL, model: NativeLlama) -> None:
        self._kernels = kernels
        self._model = model

    def draw(
        self,
        logits: Tensor,
        temperature: list[float],
        top_k: list[int],
        top_p: list[float],
        points: list[float],
    ) -> list[int]:
        """Draw a token from each row of fp32 logits [R, V]; the lists have an entry a row."""
        rows, vocab = logits.shape
        tokens = np.empty(rows, np.int32)
        asked = (
            np.array(temperature, np.float32),
            np.array(top_k, np.int32),
            np.array(top_p, np.float32),
            np.array(points, np.float64),
        )
        self._kernels.quaver_draw(
            self._model.handle,
            logits.contiguous().data_ptr(),
            rows,
            vocab,
            *(array.ctypes.data for array in asked),
            tokens.ctypes.data,
        )
        return tokens.tolist()

    def token_statistics(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Surprisal, confidence, margin, rank, entropy of emitted tokens: [R, V], [R] → [R, 5]."""
        rows, vocab = logits.shape
        found = torch.empty((rows, 5))
        chosen = tokens.to(torch.int32).contiguous()
        self._kernels.quaver_rows_statistics(
            self._model.handle,
            logits.contiguous().data_ptr(),
            rows,
            vocab,
            chosen.data_ptr(),
            found.data_ptr(),
        )
        return found


def _mass(batch: Batch) -> tuple[dict[int, Floats], NDArray[np.uint64]]:
    """Room for the mass of each scored span of a prompt, and where it is, by span; 0: not scored."""
    places = np.zeros(len(batch.counts), np.uint64)
    if batch.scored is None:
        return {}, places
    ends = batch.starts + batch.counts
    scored = np.flatnonzero((batch.scored < ends) & (batch.counts > 1)).tolist()
    mass = {span: np.empty(ends[span], np.float32) for span in scored}
    for span, found in mass.items():
        places[span] = found.ctypes.data
    return mass, places


def _detail(batch: Batch) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Layers, spans and prompt lengths of a batch's detail; empty without."""
    if batch.detail is None:
        return (np.empty(0, np.int32),) * 3
    return batch.detail.layers, batch.detail.spans, batch.detail.prompt_lengths
