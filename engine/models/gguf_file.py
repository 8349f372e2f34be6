"""Reads Llama-family models from GGUF files: config, tokenizer, and weights as float32.

GGUF keeps the rows of Q and K in the order of adjacent-pair RoPE; they come out of here in the
half-split order that Hugging Face models use.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken
from torch import Tensor

from engine.models.config import ModelConfig, ModelError, weight_shapes
from engine.tokenizer import Tokenizer, byte_level_bpe

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
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
_CONTROL, _USER_DEFINED = 3, 4


class GgufFile:
    """An open GGUF file of the Llama architecture.

    Opening maps the file and parses its metadata; weights are read on `weights()` only. Raises
    `ModelError` when the file is damaged, cut short or of an architecture we do not run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # the reader has no error type of its own
            raise ModelError(
                f"{path} is damaged or cut short ({error}); delete it and fetch it again"
            ) from error
        self._arch = str(self._get("general.architecture"))
        if self._arch != "llama":
            raise ModelError(
                f"{path}: architecture {self._arch!r} is not supported; Quaver runs 'llama' models"
            )
        self._refuse_variants()

    def config(self) -> ModelConfig:
        """Return the model's config."""
        tokens = self._get("tokenizer.ggml.tokens")
        hidden = int(self._hyper("embedding_length"))
        heads = int(self._hyper("attention.head_count"))
        bos = self._get("tokenizer.ggml.bos_token_id", None)
        return ModelConfig(
            name=str(self._get("general.name", self.path.stem)),
            architecture=self._arch,
            vocab=len(tokens),
            hidden=hidden,
            layers=int(self._hyper("block_count")),
            heads=heads,
            kv_heads=int(self._hyper("attention.head_count_kv", heads)),
            head_dim=int(self._hyper("attention.key_length", hidden // heads)),
            intermediate=int(self._hyper("feed_forward_length")),
            norm_eps=_shortest(self._hyper("attention.layer_norm_rms_epsilon")),
            rope_theta=_shortest(self._hyper("rope.freq_base", 10000.0)),
            max_context=int(self._hyper("context_length")),
            tied_embeddings=all(t.name != "output.weight" for t in self._reader.tensors),
            quantization=self._quantization(),
            bos_id=None if bos is None else int(bos),
            eos_ids=self._eos_ids(),
            add_bos=bool(self._get("tokenizer.ggml.add_bos_token", False)) and bos is not None,
        )

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the metadata describes."""
        model = self._get("tokenizer.ggml.model")
        if model != "gpt2":
            raise ModelError(
                f"{self.path}: tokenizer model {model!r} is not supported in GGUF files; "
                "use the model's safetensors folder instead"
            )
        tokens: list[str] = self._get("tokenizer.ggml.tokens")
        types: list[int] = self._get("tokenizer.ggml.token_type", [1] * len(tokens))
        merges = [tuple(pair.split(" ", 1)) for pair in self._get("tokenizer.ggml.merges")]
        config = self.config()
        try:
            backend = byte_level_bpe(tokens, merges, str(self._get("tokenizer.ggml.pre", "default")))
        except ValueError as error:
            raise ModelError(f"{self.path}: {error}") from error
        control = [
            AddedToken(t, special=True, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == _CONTROL
        ]
        user = [
            AddedToken(t, special=False, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == _USER_DEFINED
        ]
        backend.add_special_tokens(control)
        backend.add_tokens(user)
        return Tokenizer(
            backend,
            template=self._get("tokenizer.chat_template", None),
            bos_id=config.bos_id,
            eos_ids=config.eos_ids,
            add_bos=config.add_bos,
        )

    def weights(self) -> dict[str, Tensor]:
        """Return every weight as a float32 CPU tensor, [out, in], named in HF style."""
        config = self.config()
        shapes = weight_shapes(config)
        weights: dict[str, Tensor] = {}
        for tensor in self._reader.tensors:
            name = _hf_name(tensor.name)
            if name is None:
                continue
            values = torch.from_numpy(self._dequantize(tensor)).reshape(shapes.get(name, (-1,)))
            if name.endswith(".q_proj.weight"):
                values = _half_split(values, config.heads)
            elif name.endswith(".k_proj.weight"):
                values = _half_split(values, config.kv_heads)
            weights[name] = values.contiguous()
        return weights

    def _dequantize(self, tensor: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {tensor.name!r} has type {tensor.tensor_type.name}, which the gguf "
                "package cannot dequantise; use another quantisation of this model"
            ) from error
        return np.array(values, dtype=np.float32)

    def _refuse_variants(self) -> None:
        names = {t.name for t in self._reader.tensors}
        if self._hyper("expert_count", 0):
            raise ModelError(f"{self.path}: mixture-of-experts models are not supported")
        if "rope_freqs.weight" in names or self._hyper("rope.scaling.type", "none") != "none":
            raise ModelError(f"{self.path}: scaled rotary positions are not supported")
        if any(name.endswith(".bias") for name in names):
            raise ModelError(f"{self.path}: models with biases are not supported")
        width = int(
            self._hyper(
                "attention.key_length", self._hyper("embedding_length") // self._hyper("attention.head_count")
            )
        )
        if int(self._hyper("rope.dimension_count", width)) != width:
            raise ModelError(f"{self.path}: rotary positions over a part of the head are not supported")

    def _quantization(self) -> str:
        kind = self._get("general.file_type", None)
        if kind is not None:
            try:
                return gguf.LlamaFileType(int(kind)).name.removeprefix("MOSTLY_").removeprefix("ALL_")
            except ValueError:
                pass
        types = Counter(t.tensor_type.name for t in self._reader.tensors if len(t.shape) > 1)
        return types.most_common(1)[0][0] if types else "unknown"

    def _eos_ids(self) -> tuple[int, ...]:
        tokens: list[str] = self._get("tokenizer.ggml.tokens")
        types: list[int] = self._get("tokenizer.ggml.token_type", [])
        named = [self._get(f"tokenizer.ggml.{key}_token_id", None) for key in ("eos", "eot", "eom")]
        known = [
            i for i, (t, k) in enumerate(zip(tokens, types, strict=False)) if k == _CONTROL and t in _ENDINGS
        ]
        return tuple(dict.fromkeys([int(i) for i in named if i is not None] + known))

    def _hyper(self, key: str, *default: Any) -> Any:
        return self._get(f"{self._arch}.{key}", *default)

    def _get(self, key: str, *default: Any) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise ModelError(
            f"{self.path}: the metadata lacks {key!r}; the file is damaged or not a language model"
        )


def _hf_name(name: str) -> str | None:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    if not name.startswith("blk."):
        return None
    _, layer, part, suffix = name.split(".", 3)
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{suffix}" if part in _BLOCK_NAMES else None


def _half_split(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows [heads * d, in] from (pair, half) to (half, pair) order inside each head."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).transpose(1, 2).reshape(out, width)


def _shortest(value: float) -> float:
    """Return the decimal that a float32 was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
