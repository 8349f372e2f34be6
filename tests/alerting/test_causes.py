"""Patterns and the causes they name, on signals made to show them, and what is absent."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from alerting.causes import Detail, explain, load_causes
from alerting.rules import RulesError
from alerting.scores import Frozen
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS

LAYERS, HEADS = 30, 9
FROZEN = Frozen(
    responses=100,
    tokens=1000,
    surprisal=0.5,
    heads=None,
    usual=dict.fromkeys(("tap_shift", "heads_sink", "contrast", "sentence_entropy"), (0.0, 1.0))
    | {"heads_residual": (0.0, 1.0)},
)
CAUSES = load_causes()


def names(scores=None, tokens=None, details=()):
    rows = np.full((12, len(TOKEN_SIGNALS)), 0.5, np.float32) if tokens is None else tokens
    return [found.name for found in explain(CAUSES, scores or {}, FROZEN, rows, details)]


def details(lens, kl, layers=tuple(range(LAYERS))):
    """Rows of detail: `lens` [tokens] or [tokens, layers], `kl` of one head of one layer [tokens]."""
    found = []
    for step, (entropy, divergence) in enumerate(zip(lens, kl, strict=True)):
        heads = np.zeros((len(HEAD_SIGNALS), len(layers), HEADS))
        # Layer 12 of 32 and head 7 of 32 lie at layer 11 of 30 and head 2 of 9.
        if 11 in layers:
            heads[0, layers.index(11), 2] = divergence
        values = np.broadcast_to(entropy, LAYERS)[list(layers)]
        found.append(Detail(step=step, layers=layers, of=LAYERS, lens=values, heads=heads))
    return found


def test_scores_name_causes_in_the_order_of_the_file() -> None:
    assert names() == []
    assert names({"tap_shift": 7.0}) == ["logits_changed"]
    assert names({"tap_shift": 5.0}) == []
    assert names({"heads_sink": 20.0, "tap_shift": 9.0}) == ["logits_changed", "keys_misaligned"]
    assert names({"sentence_entropy": 2.0, "heads_residual": 1.0}) == ["beyond_knowledge"]
    assert names({"sentence_entropy": 2.0, "heads_residual": 9.0}) == []


def test_one_head_that_diverges_while_its_layer_jumps_needs_three_tokens() -> None:
    quiet, jumped = [2.0] * 4, [2.0] * 4 + [3.3] * 3
    assert "polluted_training_data" in names(details=details(jumped, [0.1] * 4 + [0.9] * 3))
    assert "polluted_training_data" not in names(details=details(jumped[:-1], [0.1] * 4 + [0.9] * 2))
    assert "polluted_training_data" not in names(details=details(jumped, [0.1] * 4 + [0.8] * 3))
    assert "polluted_training_data" not in names(details=details(quiet + [2.1] * 3, [0.1] * 4 + [0.9] * 3))
    sparse = tuple(range(0, LAYERS, 4))
    assert "polluted_training_data" not in names(details=details(jumped, [0.1] * 4 + [0.9] * 3, sparse))


def test_entropy_that_climbs_after_a_healthy_first_token() -> None:
    climbing = [2.0] * 4 + [2.6] * 4 + [3.2] * 4
    assert "misaligned_kv_cache" in names(details=details(climbing, [0.0] * 12))
    assert "misaligned_kv_cache" not in names(details=details([2.0] * 4 + [2.6] * 8, [0.0] * 12))
    strange = np.full((12, len(TOKEN_SIGNALS)), 0.5, np.float32)
    strange[0, TOKEN_SIGNALS.index("entropy")] = 9.0
    assert "misaligned_kv_cache" not in names(tokens=strange, details=details(climbing, [0.0] * 12))


@pytest.mark.parametrize("nothing", [None, [], np.empty(0), np.full((3, len(TOKEN_SIGNALS)), math.nan)])
def test_what_is_absent_names_nothing(nothing) -> None:
    rows = explain(CAUSES, {}, FROZEN, nothing, ())
    assert rows == []
    blank = details([math.nan] * 6, [math.nan] * 6)
    assert explain(CAUSES, {}, FROZEN, nothing, blank) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: 1\nrules: [{name: a, cause: b, look_at: c}]", "exactly one pattern"),
        (
            "version: 1\nrules: [{name: a, cause: b, look_at: c, scores: {all: {mood: 1}}}]",
            "no score is named",
        ),
        ("version: 2\nrules: []", "version"),
        ("[", "not valid YAML"),
        ("", "valid dictionary"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "causes.yaml"
    path.write_text(text)
    with pytest.raises(RulesError, match=said):
        load_causes(path)
    with pytest.raises(RulesError, match="cannot read"):
        load_causes(tmp_path / "none.yaml")
