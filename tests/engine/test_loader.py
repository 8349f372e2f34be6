"""Every checkpoint format ends in the same weights, or in an error that says what to do."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.models.config import ModelConfig, ModelError, weight_shapes
from engine.models.gguf_format import KINDS
from engine.models.loader import load, load_config, load_tokenizer
from engine.models.weights import BLOCKS
from tests.engine.conftest import FAMILIES

Kind = gguf.GGMLQuantizationType
REUSE = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def peer_weights(model):
    names = weight_shapes_of(model)
    return {name: weight for name, weight in model.state_dict().items() if name in names}


def weight_shapes_of(model):
    names = set(model.state_dict())
    return names - {"lm_head.weight"} if model.config.tie_word_embeddings else names


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("groups", [(4, 4), (4, 2), (4, 1)])
def test_gguf_gives_back_the_weights_it_was_written_from(write_gguf, tied, groups):
    path, model = write_gguf(
        tie_word_embeddings=tied, num_attention_heads=groups[0], num_key_value_heads=groups[1]
    )
    loaded = load(path)
    expected = peer_weights(model)
    assert loaded.weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(loaded.weights[name].tensor(), weight), name
        assert loaded.weights[name].data.flags.c_contiguous
    assert loaded.config.tied_embeddings is tied
    assert (loaded.config.heads, loaded.config.kv_heads) == groups


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_gguf_dequantises(write_gguf, kind):
    path, model = write_gguf(kind=kind)
    loaded = load(path)
    for name, weight in peer_weights(model).items():
        values = loaded.weights[name].tensor()
        error = (values - weight).abs().max()
        assert values.dtype == torch.float32
        assert error <= 0.1 * weight.abs().max(), name
    assert loaded.config.quantization == kind.name


def test_block_sizes_are_those_of_the_format():
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {name: sizes[name] for name in BLOCKS} == BLOCKS
    assert {number: Kind(number).name for number in KINDS} == KINDS
    assert set(KINDS.values()) == set(BLOCKS)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.BF16])
def test_gguf_blocks_are_the_very_bytes_of_the_file(write_gguf, kind):
    """Views of the file, apart from Q and K: those are its rows in another order."""
    path, _ = write_gguf(kind=kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = load(path).weights
    down, query = (
        weights["model.layers.1.mlp.down_proj.weight"],
        weights["model.layers.1.self_attn.q_proj.weight"],
    )
    assert down.kind == query.kind == kind.name
    assert np.array_equal(
        down.data, stored["blk.1.ffn_down.weight"].data.view(np.uint8).reshape(down.data.shape)
    )
    assert not down.data.flags.owndata
    rows = stored["blk.1.attn_q.weight"].data.view(np.uint8).reshape(query.data.shape)
    for row in range(64):
        head, half, pair = row // 16, row // 8 % 2, row % 8
        assert np.array_equal(query.data[row], rows[head * 16 + pair * 2 + half])


def test_gguf_of_a_kind_that_nobody_dequantises(write_gguf):
    path, _ = write_gguf(kind=Kind.F32)
    data = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16
    path.write_bytes(data[:at] + (28).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_q\.weight' has type 28"):
        load(path)


def test_gguf_config(write_gguf):
    path, _ = write_gguf(kind=Kind.Q8_0, keys={"general.name": "Tiny", "general.file_type": 7})
    config = load_config(path)
    assert config == ModelConfig(
        name="Tiny",
        architecture="llama",
        vocab=263,
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=96,
        norm_eps=1e-5,
        rope_theta=5000.0,
        max_context=128,
        tied_embeddings=True,
        quantization="Q8_0",
        bos_id=1,
        eos_ids=(2, 0),
        add_bos=False,
    )


@pytest.mark.parametrize("shard", ["1GB", "40KB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_folder(write_folder, shard, tied, dtype):
    folder, model = write_folder(shard, tie_word_embeddings=tied)
    if dtype == torch.bfloat16:
        model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) is (shard == "40KB")
    loaded = load(folder)
    expected = peer_weights(model)
    assert loaded.weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(loaded.weights[name].tensor(), weight.float()), name
    assert loaded.config == load_config(folder)
    assert loaded.config.rope_theta == 5000.0
    assert (loaded.config.bos_id, loaded.config.eos_ids, loaded.config.add_bos) == (1, (2,), False)
    assert loaded.config.quantization == "none"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model_in_both_formats(write_gguf, write_folder, family):
    one, other = load(write_gguf(family=family)[0]), load(write_folder(family=family)[0])
    of_files = {"name": "", "quantization": "", "eos_ids": (), "architecture": ""}
    assert replace(one.config, **of_files) == replace(other.config, **of_files)

    def same(a, b):
        return (a.kind, a.shape) == (b.kind, b.shape) and np.array_equal(a.data, b.data)

    assert all(same(one.weights[name], other.weights[name]) for name in weight_shapes(one.config))
    text = "hello world, hell 123 <|im_end|>"
    assert one.tokenizer.encode(text) == other.tokenizer.encode(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "gpt_neox"}, "'gpt_neox' is not supported"),
        ({"keys": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, "rotary"),
        ({"keys": {"llama.rope.dimension_count": 8}}, "a part of the head"),
        ({"keys": {"llama.attention.head_count": None}}, "lacks 'llama.attention.head_count'"),
        ({"keys": {"llama.attention.head_count": "four"}}, "make no sense"),
        ({"keys": {"llama.attention.head_count": 0}}, "make no sense"),
        ({"keys": {"llama.attention.head_count_kv": 3}}, "cannot share"),
        ({"keys": {"llama.feed_forward_length": 0}}, "at least 1"),
        ({"keys": {"llama.block_count": 1 << 31}}, "at most 1024"),
        ({"keys": {"llama.feed_forward_length": 95}}, "the config asks"),
        ({"keys": {"tokenizer.ggml.model": "llama"}}, "use the model's safetensors folder"),
        ({"keys": {"tokenizer.ggml.pre": "klingon"}}, "pre-tokenizer 'klingon' is not known"),
        ({"keys": {"tokenizer.ggml.merges": ["x y"]}}, "merges do not fit the vocabulary"),
        ({"keys": {"tokenizer.ggml.merges": 7}}, "tokenizer cannot be built"),
        ({"keys": {"tokenizer.ggml.pre": None}}, "lacks 'tokenizer.ggml.pre'"),
        ({"keys": {"tokenizer.chat_template": "{% if %}"}}, "chat template"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "no part of a llama model"),
        ({"extra": {"blk.0.attn_q_norm.weight": np.zeros(16, np.float32)}}, "no part of a llama model"),
        ({"extra": {"rope_freqs.weight": np.ones(7, np.float32)}}, "rotary divisors must be 8"),
        ({"family": "qwen2", "drop": "blk.1.attn_v.bias"}, "lacks 1 tensor"),
        ({"family": "qwen3", "drop": "blk.1.attn_k_norm.weight"}, "lacks 1 tensor"),
        ({"keys": {"llama.attention.sliding_window_pattern": [True, False]}}, "some layers only"),
        ({"drop": "blk.1.ffn_up.weight"}, "lacks 1 tensor"),
    ],
)
def test_gguf_that_cannot_run_is_refused_by_name(write_gguf, changes, said):
    path, _ = write_gguf(**changes)
    with pytest.raises(ModelError, match=said) as refusal:
        load(path).tokenizer  # noqa: B018
    assert str(path) in str(refusal.value)


@REUSE
@given(share=st.floats(0, 1, exclude_max=True))
def test_gguf_cut_anywhere_is_refused(gguf_bytes, tmp_path, share):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes[: int(len(gguf_bytes.rstrip(b"\0")) * share)])
    with pytest.raises(ModelError, match="fetch it again"):
        load(path)


@REUSE
@given(at=st.integers(0, 8000), value=st.integers(0, 255))
def test_gguf_with_a_damaged_head_never_fails_otherwise(gguf_bytes, tmp_path, at, value):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes[:at] + bytes([value]) + gguf_bytes[at + 1 :])
    with contextlib.suppress(ModelError):
        load(path).tokenizer  # noqa: B018


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04 something else"])
def test_not_a_gguf_file(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="fetch it again"):
        load(path)


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {"sliding_window": 11}, 11),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 128}, None),
        ("qwen2", {"sliding_window": 11}, None),
        ("qwen2", {"sliding_window": 11, "use_sliding_window": True, "max_window_layers": 0}, 11),
        ("qwen2", {"sliding_window": 11, "use_sliding_window": True, "max_window_layers": 2}, None),
    ],
)
def test_window_of_a_folder(write_folder, family, changes, window):
    """One that reaches over the whole context is none."""
    folder, _ = write_folder(family=family, **changes)
    assert load_config(folder).sliding_window == window


def test_nothing_there(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match=r"has no config.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
            "'GemmaForCausalLM' is not supported",
        ),
        ({"model_type": "qwen2"}, "'LlamaForCausalLM' is not supported"),
        (
            {
                **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True},
                **{"sliding_window": 11, "layer_types": ["full_attention", "sliding_attention"]},
            },
            "some layers only",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "lacks 'factor'"),
        ({"quantization_config": {"bits": 4}}, "use a GGUF file"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "'yarn' are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": None}, "makes no sense"),
        ({"num_attention_heads": 0}, "makes no sense"),
        ({"intermediate_size": 97}, "the config asks"),
    ],
)
def test_folder_that_cannot_run_is_refused_by_name(write_folder, change, said):
    folder, _ = write_folder()
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=said) as refusal:
        load(folder)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", "cannot be read"),
        ("tokenizer.json", "is damaged"),
        ("tokenizer_config.json", "cannot be read"),
        ("model.safetensors", "cut short"),
        ("chat_template.jinja", "chat template"),
    ],
)
def test_folder_with_a_damaged_file(write_folder, name, said):
    folder, _ = write_folder()
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=said):
        load(folder).tokenizer  # noqa: B018


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_folder_without_a_file(write_folder, name):
    folder, _ = write_folder()
    (folder / name).unlink()
    with pytest.raises(ModelError, match=r"has no|is missing"):
        load(folder)


def test_folder_of_weights_in_a_type_that_we_do_not_read(write_folder):
    folder, model = write_folder()
    model.to(torch.float64).save_pretrained(folder)
    with pytest.raises(ModelError, match=r"safetensors: model\..* torch.float64 is none of F32, F16, BF16"):
        load(folder)


def test_folder_without_a_shard(write_folder):
    folder, _ = write_folder("40KB")
    sorted(folder.glob("*.safetensors"))[0].unlink()
    with pytest.raises(ModelError, match="is missing"):
        load(folder)


@pytest.mark.model
def test_the_real_model(smollm: Path):
    loaded = load(smollm)
    config = loaded.config
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (
        30,
        576,
        9,
        3,
        64,
    )
    assert (config.vocab, config.max_context, config.rope_theta, config.norm_eps) == (49152, 8192, 1e5, 1e-5)
    assert (config.quantization, config.tied_embeddings, config.add_bos) == ("Q4_1", True, False)
    assert config.bos_id == 1
    assert config.eos_ids == (2, 0)
    assert sum(math.prod(weight.shape) for weight in loaded.weights.values()) == 134_515_008
    assert load_tokenizer(smollm).encode("hi") == loaded.tokenizer.encode("hi")
