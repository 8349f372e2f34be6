"""transformers on the same weights: plain, and with everything that our signals tell."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.peers.base import Prompt
from engine.models import store
from engine.models.config import ModelConfig
from engine.models.loader import load
from engine.settings import EngineSettings


class Transformers:
    """`LlamaForCausalLM` with SDPA, or eager attention where attention weights are asked for."""

    def __init__(self, threads: int, dtype: str = "bfloat16") -> None:
        torch.set_num_threads(threads)
        settings = EngineSettings()
        loaded = load(store.resolve(settings.model, settings.model_cache))
        weights = {name: weight.tensor() for name, weight in loaded.weights.items()}
        self._model = model_of(loaded.config, weights, getattr(torch, dtype))
        self._past: Any = None
        self._tokens = torch.empty(0, 1, dtype=torch.int64)

    def describe(self) -> dict[str, Any]:
        """Return the version and the bytes of weights that a step reads."""
        tensors = {p.data_ptr(): p.nbytes for p in self._model.parameters()}
        return {"version": transformers.__version__, "weight_bytes": sum(tensors.values())}

    def prefill(self, prompt: Prompt) -> float:
        """Seconds from a prompt to the choice of its first token."""
        self._model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            began = time.perf_counter()
            self._model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).item()
            return time.perf_counter() - began

    def prepare(self, prompts: list[Prompt], steps: int, signals: bool = False) -> None:
        """Fill a cache with `prompts`, all of one length."""
        self._model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            found = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        self._past, self._tokens = found.past_key_values, found.logits[:, -1].argmax(-1, keepdim=True)

    def decode(self, steps: int, signals: bool = False) -> float:
        """Seconds that `steps` greedy tokens of every sequence took.

        With `signals`, attentions and hidden states are asked for, and the entropy of every layer's
        lens and every head's divergence from its layer's mean are computed from them.
        """
        self._model.set_attn_implementation("eager" if signals else "sdpa")
        with torch.inference_mode():
            began = time.perf_counter()
            for _ in range(steps):
                found = self._model(
                    self._tokens,
                    past_key_values=self._past,
                    use_cache=True,
                    output_attentions=signals,
                    output_hidden_states=signals,
                )
                self._tokens = found.logits[:, -1].argmax(-1, keepdim=True)
                if signals:
                    self._lens_entropies(found.hidden_states)
                    _head_divergences(found.attentions)
            return time.perf_counter() - began

    def score(self, windows: list[Prompt]) -> dict[str, list[float] | list[int]]:
        """Probabilities and likeliest tokens of whole windows."""
        logprobs: list[float] = []
        top: list[int] = []
        self._model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            for window in windows:
                logits = self._model(torch.tensor([window])).logits[0, :-1].float()
                wanted = torch.tensor(window[1:])[:, None]
                logprobs += logits.log_softmax(-1).gather(-1, wanted)[:, 0].tolist()
                top += logits.argmax(-1).tolist()
        return {"logprobs": logprobs, "top1": top}

    def _lens_entropies(self, hidden: tuple[Tensor, ...]) -> list[list[float]]:
        """Entropies [layer, sequence], in nats; the last hidden state has its norm already."""
        states = torch.stack([state[:, -1] for state in hidden[1:]])
        states[:-1] = self._model.model.norm(states[:-1])
        logprobs = self._model.lm_head(states).float().log_softmax(-1)
        entropies: list[list[float]] = (logprobs.exp() * logprobs).sum(-1).neg().tolist()
        return entropies


def _head_divergences(attentions: tuple[Tensor, ...]) -> list[Any]:
    """KL of each head to the mean of its layer [layer, sequence, head], in nats."""
    shares = torch.stack([attention[:, :, -1] for attention in attentions]).float()
    mean = shares.mean(2, keepdim=True)
    divergences: list[Any] = (torch.xlogy(shares, shares) - torch.xlogy(shares, mean)).sum(-1).tolist()
    return divergences


def model_of(config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Return the peer's model with our loader's config and weights."""
    model = transformers.LlamaForCausalLM(
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
        )
    )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"weights do not fit: {missing} are missing, {unexpected} are not known")
    model.tie_weights()
    cast: Any = model  # its `to` is not typed
    return cast.to(dtype).eval()
