"""Reads Llama-like models from GGUF files: config, tokenizer, and weights as stored.

For the architecture `llama` (Mistral included) GGUF keeps the rows of Q and K in the order of
adjacent-pair RoPE; they come out of here in the half-split order that Hugging Face models use, and
that GGUF itself has for `qwen2` and `qwen3`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.config import ModelConfig, ModelError, weight_shapes
from engine.models.gguf_format import FormatError, Strings, read_gguf
from engine.models.weights import StoredWeight
from engine.tokenizer import Tokenizer, byte_level_bpe

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
#: Control tokens that end an answer in the known chat formats, whatever `eos_token_id` says.
_ENDINGS = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "</s>"})
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_CONTROL, _USER_DEFINED = 3, 4
_FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
    **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
    **{21: "Q2_K_S", 32: "BF16"},
}


class GgufFile:
    """An open GGUF file of an architecture that we run.

    Opening maps the file and parses its metadata; weights are mapped, not read. Raises
    `ModelError` when the file is damaged, cut short or of an architecture we do not run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._contents = read_gguf(path)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        except FormatError as error:
            raise ModelError(
                f"{path} is damaged, cut short or no GGUF file: {error}; fetch it again"
            ) from error
        self._arch = str(self._get("general.architecture"))
        if self._arch not in _ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {self._arch!r} is not supported; "
                f"Quaver runs {', '.join(_ARCHITECTURES)} models"
            )
        try:
            self._refuse_variants()
            self._config = self._read_config()
            self._refuse_tensors()
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"{path}: the metadata make no sense ({error}); fetch it again") from error

    def config(self) -> ModelConfig:
        """Return the model's config."""
        return self._config

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the metadata describe."""
        model = self._get("tokenizer.ggml.model")
        if model != "gpt2":
            raise ModelError(
                f"{self.path}: tokenizer model {model!r} is not supported in GGUF files; "
                "use the model's safetensors folder instead"
            )
        try:
            pairs = (pair.partition(" ") for pair in self._get("tokenizer.ggml.merges"))
            merges = [(left, right) for left, _, right in pairs]
            backend = byte_level_bpe(
                list(self._get("tokenizer.ggml.tokens")),
                merges,
                pre_tokenizer=str(self._get("tokenizer.ggml.pre")),
                special=self._tokens_of_type(_CONTROL),
                whole=self._tokens_of_type(_USER_DEFINED),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{self.path}: the tokenizer cannot be built: {error}") from error
        return Tokenizer(
            backend,
            template=self._get("tokenizer.chat_template", None),
            bos_id=self._config.bos_id,
            eos_ids=self._config.eos_ids,
            add_bos=self._config.add_bos,
        )

    def weights(self) -> dict[str, StoredWeight]:
        """Return every weight, named in HF style; Q and K are copies, the rest views of the file."""
        shapes = weight_shapes(self._config)
        heads = {"q_proj.weight": self._config.heads, "k_proj.weight": self._config.kv_heads}
        found = {_hf_name(name): weight for name, weight in self._contents.tensors.items()}
        weights = {name: weight for name, weight in found.items() if name is not None}
        if self._arch != "llama":
            return weights
        for name, shape in shapes.items():
            count = heads.get(name.rsplit("self_attn.", 1)[-1])
            if count is not None and name in weights and weights[name].shape == shape:
                weights[name] = weights[name].reordered(_half_split(shape[0], count))
        return weights

    def _read_config(self) -> ModelConfig:
        hidden = int(self._hyper("embedding_length"))
        heads = int(self._hyper("attention.head_count"))
        bos = self._get("tokenizer.ggml.bos_token_id", None)
        divisors = self._contents.tensors.get("rope_freqs.weight")
        return ModelConfig(
            name=str(self._get("general.name", self.path.stem)),
            architecture=self._arch,
            vocab=len(self._get("tokenizer.ggml.tokens")),
            hidden=hidden,
            layers=int(self._hyper("block_count")),
            heads=heads,
            kv_heads=int(self._hyper("attention.head_count_kv", heads)),
            head_dim=int(self._hyper("attention.key_length", hidden // heads)),
            intermediate=int(self._hyper("feed_forward_length")),
            norm_eps=_shortest(self._hyper("attention.layer_norm_rms_epsilon")),
            rope_theta=_shortest(self._hyper("rope.freq_base", 10000.0)),
            max_context=int(self._hyper("context_length")),
            tied_embeddings="output.weight" not in self._contents.tensors,
            quantization=self._quantization(),
            bos_id=None if bos is None else int(bos),
            eos_ids=self._eos_ids(),
            add_bos=bool(self._get("tokenizer.ggml.add_bos_token", False)) and bos is not None,
            qkv_bias=self._arch == "qwen2",
            qk_norm=self._arch == "qwen3",
            sliding_window=self._window(),
            rope_divisors=None if divisors is None else tuple(map(_shortest, divisors.tensor().tolist())),
        )

    def _window(self) -> int | None:
        window = int(self._hyper("attention.sliding_window", 0))
        return window if 0 < window < int(self._hyper("context_length")) else None

    def _refuse_variants(self) -> None:
        if self._hyper("expert_count", 0):
            raise ModelError(f"{self.path}: mixture-of-experts models are not supported")
        scaling = self._hyper("rope.scaling.type", "none")
        if scaling != "none":
            raise ModelError(f"{self.path}: rotary positions scaled in the way {scaling!r} are not supported")
        if self._hyper("attention.sliding_window_pattern", None) is not None:
            raise ModelError(f"{self.path}: a sliding window on some layers only is not supported")
        hidden, heads = self._hyper("embedding_length"), self._hyper("attention.head_count")
        width = self._hyper("attention.key_length", hidden // heads)
        if self._hyper("rope.dimension_count", width) != width:
            raise ModelError(f"{self.path}: rotary positions over a part of the head are not supported")

    def _refuse_tensors(self) -> None:
        """Refuse layers with weights that we would leave out: their arithmetic is another."""
        known = weight_shapes(self._config)
        for name in self._contents.tensors:
            if name.startswith("blk.") and _hf_name(name) not in known:
                raise ModelError(
                    f"{self.path}: tensor {name!r} is no part of a {self._arch} model that Quaver runs"
                )

    def _quantization(self) -> str:
        label = _FILE_TYPES.get(self._get("general.file_type", None))
        kinds = Counter(weight.kind for weight in self._contents.tensors.values() if len(weight.shape) > 1)
        return label or (kinds.most_common(1)[0][0] if kinds else "unknown")

    def _eos_ids(self) -> tuple[int, ...]:
        named = [self._get(f"tokenizer.ggml.{key}_token_id", None) for key in ("eos", "eot", "eom")]
        tokens, control = self._get("tokenizer.ggml.tokens"), self._ids_of_type(_CONTROL)
        known = [i for i in control if tokens[i] in _ENDINGS]
        return tuple(dict.fromkeys([int(i) for i in named if i is not None] + known))

    def _tokens_of_type(self, kind: int) -> list[str]:
        tokens: Strings = self._get("tokenizer.ggml.tokens")
        return [tokens[i] for i in self._ids_of_type(kind)]

    def _ids_of_type(self, kind: int) -> list[int]:
        vocab, types = len(self._get("tokenizer.ggml.tokens")), self._get("tokenizer.ggml.token_type", [])
        return [i for i, of in enumerate(types[:vocab]) if of == kind]

    def _hyper(self, key: str, *default: Any) -> Any:
        return self._get(f"{self._arch}.{key}", *default)

    def _get(self, key: str, *default: Any) -> Any:
        if key in self._contents.metadata:
            return self._contents.metadata[key]
        if default:
            return default[0]
        raise ModelError(
            f"{self.path}: the metadata lacks {key!r}; the file is damaged or not a language model"
        )


def _hf_name(name: str) -> str | None:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, suffix] if part in _BLOCK_NAMES:
            return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{suffix}"
    return None


def _half_split(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return, in (half, pair) order inside each head, the places of rows kept in (pair, half) order."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def _shortest(value: float) -> float:
    """Return the decimal that a float32 was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
