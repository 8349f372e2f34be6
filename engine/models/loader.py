"""Loads a model from a GGUF file or from a Hugging Face folder, into one common form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.models.config import ModelConfig, ModelError, weight_shapes
from engine.models.gguf_file import GgufFile
from engine.models.safetensors_folder import SafetensorsFolder
from engine.tokenizer import ChatTemplateError, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: float32 CPU `weights`, HF names, Q and K rows in half-split order."""

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer


def load(path: Path) -> LoadedModel:
    """Load everything from a `.gguf` file or a safetensors folder. Raises `ModelError`."""
    source = _open(path)
    config = source.config()
    tokenizer = _tokenizer(source)
    weights = source.weights()
    check_weights(path, config, weights)
    return LoadedModel(config, weights, tokenizer)


def load_config(path: Path) -> ModelConfig:
    """Load the config alone, without touching the weights. Raises `ModelError`."""
    return _open(path).config()


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer alone, without touching the weights. Raises `ModelError`."""
    return _tokenizer(_open(path))


def check_weights(path: Path, config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Raise `ModelError` unless `weights` are exactly those that `config` asks for."""
    shapes = weight_shapes(config)
    missing = sorted(shapes.keys() - weights.keys())
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} tensors ({missing[0]} first); fetch the model again")
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ModelError(
                f"{path}: {name} has shape {list(weights[name].shape)}, the config asks {list(shape)}"
            )


def _tokenizer(source: GgufFile | SafetensorsFolder) -> Tokenizer:
    try:
        return source.tokenizer()
    except ChatTemplateError as error:
        raise ModelError(f"{source.path}: {error}") from error


def _open(path: Path) -> GgufFile | SafetensorsFolder:
    path = path.expanduser()
    if not path.exists():
        raise ModelError(f"{path} does not exist; give a .gguf file or a safetensors folder")
    return SafetensorsFolder(path) if path.is_dir() else GgufFile(path)
