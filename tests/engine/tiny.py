"""A small random model; tests `replace` the sizes that matter to them."""

from __future__ import annotations

import torch

from engine import kernels
from engine.models.config import ModelConfig, weight_shapes
from engine.models.llama import Llama
from engine.models.weights import stored

TINY = ModelConfig(
    name="random",
    architecture="llama",
    vocab=61,
    hidden=32,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    max_context=64,
    tied_embeddings=False,
    quantization="none",
    bos_id=None,
    eos_ids=(0,),
    add_bos=False,
)


def random_model(config: ModelConfig, seed: int) -> Llama:
    """Return a model with random weights on the reference kernels, in float32."""
    source = torch.Generator().manual_seed(seed)
    weights = {
        name: stored(torch.ones(shape) if "norm" in name else torch.randn(shape, generator=source) * 0.3)
        for name, shape in weight_shapes(config).items()
    }
    return Llama(config, weights, torch.float32, kernels.load("reference"))
