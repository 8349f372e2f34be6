"""The sizes of a small random model; tests `replace` what matters to them."""

from __future__ import annotations

from engine.models.config import ModelConfig

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
