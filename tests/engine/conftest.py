"""Small checkpoints of every family in every format we read, and the real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from engine.models import store
from engine.settings import EngineSettings

if TYPE_CHECKING:
    import transformers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"))
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def vocabulary() -> list[str]:
    """Three specials, the 256 byte characters and four merged words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIALS, *alphabet, *("".join(pair) for pair in MERGES)]


#: What each family's checkpoints add to the sizes below, so that its own arithmetic shows.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 11, "head_dim": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
}


def random_model(family: str = "llama", **changes: Any) -> transformers.PreTrainedModel:
    """A seeded random model of the peer implementation, a few thousand weights, logits of some size."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **sizes | FAMILIES[family] | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.normal_(1.0, 0.2)
            elif name.endswith(".bias"):
                weight.normal_(0.0, 0.5)
    return model


@pytest.fixture(scope="session")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole GGUF file of a random model."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    save_gguf(path)
    return path.read_bytes()


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., tuple[Path, transformers.PreTrainedModel]]:
    """Return a writer of Hugging Face folders: (folder, the peer's model)."""

    def write(shard: str = "1GB", bos: bool = False, **changes: Any) -> tuple[Path, Any]:
        model = random_model(**changes)
        folder = tmp_path / "checkpoint"
        model.save_pretrained(folder, max_shard_size=shard)
        words = tokenizers.Tokenizer(
            models.BPE(vocab={t: i for i, t in enumerate(vocabulary())}, merges=list(MERGES))
        )
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        words.decoder = decoders.ByteLevel()
        words.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
        if bos:
            words.post_processor = processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
            )
        words.save(str(folder / "tokenizer.json"))
        bos_token = "<|endoftext|>" if bos else "<|im_start|>"
        (folder / "tokenizer_config.json").write_text(
            f'{{"bos_token": "{bos_token}", "eos_token": {{"content": "<|im_end|>"}}}}'
        )
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        return folder, model

    return write


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., tuple[Path, transformers.PreTrainedModel]]:
    """Return a writer of GGUF files: (file, the peer's model). `keys` replace metadata; None drops one."""

    def write(**changes: Any) -> tuple[Path, Any]:
        path = tmp_path / "model.gguf"
        return path, save_gguf(path, **changes)

    return write


def save_gguf(
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str | None = None,
    family: str = "llama",
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    drop: str | None = None,
    **changes: Any,
) -> transformers.PreTrainedModel:
    """Write a random model as GGUF, the way converters do; return the peer's model."""
    model = random_model(family, **changes)
    writer = gguf.GGUFWriter(path, architecture or ("llama" if family == "mistral" else family))
    _add_metadata(writer, model.config, keys or {})
    tensors = {
        _gguf_name(name): _gguf_rows(name, weight, model.config)
        for name, weight in model.state_dict().items()
    }
    if model.config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    for name, values in (tensors | (extra or {})).items():
        if name == drop:
            continue
        stored = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_metadata(writer: gguf.GGUFWriter, config: Any, keys: dict[str, Any]) -> None:
    arch = writer.arch
    values: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": getattr(config, "head_dim", None),
        f"{arch}.attention.sliding_window": getattr(config, "sliding_window", None),
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary(),
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(vocabulary()) - len(SPECIALS)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    for key, value in (values | keys).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)


def _gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    part, suffix = name.removeprefix("model.layers.").rsplit(".", 1)
    layer, part = part.split(".", 1)
    return f"blk.{layer}.{TENSORS[part]}.{suffix}"


def _gguf_rows(name: str, weight: torch.Tensor, config: Any) -> np.ndarray:
    """Converters put Q and K rows of Llama from (half, pair) to (pair, half) order inside each head."""
    rows = weight.detach().float().numpy()
    if config.model_type in ("qwen2", "qwen3") or ("q_proj" not in name and "k_proj" not in name):
        return rows
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The real model's file, pulled on first use into the user's cache."""
    return store.pull("smollm2-135m", EngineSettings().model_cache)
