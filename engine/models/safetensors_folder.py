"""Reads Llama-like models from Hugging Face folders: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from safetensors import SafetensorError, safe_open

from engine.models.config import FAMILIES, ModelConfig, ModelError, weight_shapes
from engine.models.rotary import llama3_divisors
from engine.models.weights import StoredWeight, stored
from engine.tokenizer import Tokenizer

_T = TypeVar("_T")


class SafetensorsFolder:
    """A Hugging Face model folder of a family that we run.

    Opening reads config.json; weights and tokenizer are read when asked for. Raises `ModelError`
    when a file is missing or damaged, or the config asks for arithmetic that we do not do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw = self._json("config.json")
        self._refuse_variants()
        self._tokenizer_config = self._json("tokenizer_config.json", optional=True)
        self._tokenizer: tokenizers.Tokenizer | None = None
        self._config = self._sensibly("config.json", self._read_config)

    def config(self) -> ModelConfig:
        """Return the model's config."""
        return self._config

    def tokenizer(self) -> Tokenizer:
        """Return the folder's tokenizer with its chat template, if it has one."""
        return Tokenizer(
            self._backend(),
            template=self._template(),
            bos_id=self._config.bos_id,
            eos_ids=self._config.eos_ids,
            add_bos=self._config.add_bos,
        )

    def weights(self) -> dict[str, StoredWeight]:
        """Return every weight that the config asks for and the folder has, as views of its files."""
        wanted = weight_shapes(self._config).keys()
        weights: dict[str, StoredWeight] = {}
        for file in self._shards():
            try:
                with safe_open(file, framework="pt") as shard:
                    for name in shard.keys() & wanted:
                        weights[name] = stored(shard.get_tensor(name))
            except ValueError as error:
                raise ModelError(f"{file}: {name} cannot be read: {error}") from error
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{file} is missing, damaged or cut short ({error}); fetch the model again"
                ) from error
        return weights

    def _read_config(self) -> ModelConfig:
        raw = self._raw
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        backend = self._backend()
        bos = self._token_id("bos_token")
        rope = self._rope()
        theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
        width = int(raw.get("head_dim") or hidden // heads)
        return ModelConfig(
            name=self.path.resolve().name,
            architecture=raw["model_type"],
            vocab=int(raw["vocab_size"]),
            hidden=hidden,
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=width,
            intermediate=int(raw["intermediate_size"]),
            norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=theta,
            max_context=int(raw["max_position_embeddings"]),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            quantization="none",
            bos_id=bos,
            eos_ids=self._eos_ids(),
            add_bos=bos is not None and list(backend.encode("a").ids)[:1] == [bos],
            qkv_bias=raw["model_type"] == "qwen2",
            qk_norm=raw["model_type"] == "qwen3",
            sliding_window=self._window(),
            rope_divisors=llama3_divisors(theta, width, rope) if _kind(rope) == "llama3" else None,
        )

    def _window(self) -> int | None:
        """Return the window that every layer has; those of Qwen sleep unless the config wakes them."""
        raw = self._raw
        window = raw.get("sliding_window")
        asleep = raw["model_type"] != "mistral" and not raw.get("use_sliding_window", False)
        if not window or asleep or window >= raw["max_position_embeddings"]:
            return None
        layers = int(raw["num_hidden_layers"])
        full = min(int(raw.get("max_window_layers", 0 if raw["model_type"] == "mistral" else 28)), layers)
        kinds = raw.get("layer_types") or ["full_attention"] * full + ["sliding_attention"] * (layers - full)
        if len(set(kinds)) > 1:
            raise ModelError(f"{self.path}: a sliding window on some layers only is not supported")
        return int(window) if kinds[0] == "sliding_attention" else None

    def _refuse_variants(self) -> None:
        raw = self._raw
        family = str(raw.get("model_type"))
        names = raw.get("architectures") or [FAMILIES.get(family)]
        if family not in FAMILIES or names != [FAMILIES[family]]:
            raise ModelError(
                f"{self.path}: architecture {(names[0] or family)!r} is not supported; "
                f"Quaver runs {', '.join(FAMILIES.values())}"
            )
        if raw.get("quantization_config"):
            raise ModelError(
                f"{self.path}: quantised safetensors are not supported; use a GGUF file of this model"
            )
        rope = self._rope()
        kind = _kind(rope)
        if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{self.path}: rotary positions of type {kind!r} are not supported")
        for key, required in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
            if key == "attention_bias" and family == "qwen2":
                continue  # always on Q, K and V, never on the output, whatever the config says
            if raw.get(key, required) != required:
                raise ModelError(f"{self.path}: {key} = {raw[key]!r} is not supported, only {required!r}")

    def _rope(self) -> dict[str, Any]:
        return dict(self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {})

    def _eos_ids(self) -> tuple[int, ...]:
        found: list[int] = []
        for raw in (self._json("generation_config.json", optional=True), self._raw):
            ids = raw.get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids] if ids is not None else []
        named = self._token_id("eos_token")
        return tuple(dict.fromkeys([*found, *([] if named is None else [named])]))

    def _token_id(self, key: str) -> int | None:
        """Return the id of `bos_token` or `eos_token`: the tokenizer's word counts before the config's."""
        token = self._tokenizer_config.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            return self._backend().token_to_id(text)
        number = self._raw.get(f"{key}_id")
        return number if isinstance(number, int) else None

    def _template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.exists():
            return file.read_text(encoding="utf-8")
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        return template if isinstance(template, str) else None

    def _backend(self) -> tokenizers.Tokenizer:
        if self._tokenizer is None:
            file = self.path / "tokenizer.json"
            if not file.exists():
                raise ModelError(f"{self.path} has no tokenizer.json; fetch the model again")
            try:
                self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:  # tokenizers raises plain Exception
                raise ModelError(f"{file} is damaged ({error}); fetch the model again") from error
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
        return self._tokenizer

    def _shards(self) -> list[Path]:
        index = self._json("model.safetensors.index.json", optional=True)
        if not index:
            return [self.path / "model.safetensors"]
        names = self._sensibly(
            "model.safetensors.index.json", lambda: sorted(set(index["weight_map"].values()))
        )
        return [self.path / Path(name).name for name in names]

    def _json(self, name: str, *, optional: bool = False) -> dict[str, Any]:
        file = self.path / name
        if optional and not file.exists():
            return {}
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelError(f"{self.path} has no {name}; it is no Hugging Face model folder") from error
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read ({error}); fetch the model again") from error
        if not isinstance(content, dict):
            raise ModelError(f"{file} does not hold a JSON object; fetch the model again")
        return content

    def _sensibly(self, name: str, read: Callable[[], _T]) -> _T:
        try:
            return read()
        except KeyError as error:
            raise ModelError(f"{self.path / name} lacks {error}; fetch the model again") from error
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ModelError(f"{self.path / name} makes no sense ({error}); fetch the model again") from error


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))
