"""Loads a model from a GGUF file or from a Hugging Face folder, into one common form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from engine.models.config import ModelConfig, ModelError, weight_shapes
from engine.models.gguf_file import GgufFile
from engine.models.safetensors_folder import SafetensorsFolder
from engine.models.weights import StoredWeight
from engine.tokenizer import ChatTemplateError, Tokenizer


class LoadedModel:
    """An open model: its config, its weights as stored, its tokenizer once somebody asks for it.

    `weights` have HF names, Q and K rows in half-split order. They may be views of the mapped
    files: replacing a file is safe, writing into it is not.
    """

    def __init__(self, source: GgufFile | SafetensorsFolder) -> None:
        self._source = source
        self.config: ModelConfig = source.config()
        self.weights: Mapping[str, StoredWeight] = source.weights()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ModelError`."""
        return _tokenizer(self._source)


def load(path: Path) -> LoadedModel:
    """Open a `.gguf` file or a safetensors folder. Raises `ModelError`."""
    model = LoadedModel(_open(path))
    check_weights(path, model.config, model.weights)
    return model


def load_config(path: Path) -> ModelConfig:
    """Load the config alone, without touching the weights. Raises `ModelError`."""
    return _open(path).config()


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer alone, without touching the weights. Raises `ModelError`."""
    return _tokenizer(_open(path))


def check_weights(path: Path, config: ModelConfig, weights: Mapping[str, StoredWeight]) -> None:
    """Raise `ModelError` unless `weights` are exactly those that `config` asks for."""
    shapes = weight_shapes(config)
    missing = sorted(shapes.keys() - weights.keys())
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} tensors ({missing[0]} first); fetch the model again")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
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
