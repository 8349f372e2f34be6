"""What a model is made of, and the one error that says why a model cannot be used."""

from __future__ import annotations

from dataclasses import dataclass

#: Model families that run, by GGUF's and Hugging Face's common name, and the latter's class.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class ModelError(Exception):
    """A model cannot be used; the message names the file, the cause and the mend."""


#: Far above any model of this family; keeps a damaged number from asking for endless memory.
_MOST = {
    "vocab": 1 << 22,
    "hidden": 1 << 18,
    "layers": 1 << 10,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "intermediate": 1 << 20,
    "max_context": 1 << 22,
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a Llama-like model, in the same terms for every file format.

    `heads` query heads share `kv_heads` key-value heads, each `head_dim` wide. RoPE is the
    half-split kind over the whole head; `rope_divisors` (head_dim/2) divide its frequencies.
    `qkv_bias`: the projections to Q, K and V have biases. `qk_norm`: each head's query and key is
    normed before RoPE. `sliding_window`: a token attends to that many last ones, itself included;
    None where that is no limit. `eos_ids` are the tokens that end an answer; `add_bos`
    says whether every prompt starts with `bos_id`. `quantization` is the label of the weights as
    stored ("Q4_1", "F16", …); "none" for an unquantised safetensors folder. Raises ValueError for
    sizes that cannot be.
    """

    name: str
    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope_theta: float
    max_context: int
    tied_embeddings: bool
    quantization: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    rope_divisors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for field, most in _MOST.items():
            if not 1 <= getattr(self, field) <= most:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1, at most {most}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions need pairs")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"a sliding window of {self.sliding_window} tokens")
        divisors = self.rope_divisors
        if divisors is not None and (len(divisors) != self.head_dim // 2 or not min(divisors) > 0):
            raise ValueError(f"rotary divisors must be {self.head_dim // 2} positive numbers")


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every weight that a model of this config has, HF style.

    Matrices are [out, in]. `lm_head.weight` is absent when the embeddings are tied.
    """
    hidden, inner = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config.layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
        if config.qkv_bias:
            shapes |= {
                f"{layer}.self_attn.q_proj.bias": (queries,),
                f"{layer}.self_attn.k_proj.bias": (keys,),
                f"{layer}.self_attn.v_proj.bias": (keys,),
            }
        if config.qk_norm:
            shapes |= {
                f"{layer}.self_attn.q_norm.weight": (config.head_dim,),
                f"{layer}.self_attn.k_norm.weight": (config.head_dim,),
            }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    return shapes
