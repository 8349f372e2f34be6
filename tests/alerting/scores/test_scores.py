"""What every score sees, on answers whose tokens and heads are drawn here."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from alerting.scores import (
    SCORES,
    FitError,
    Frozen,
    LayerRow,
    Response,
    fit,
    layer_row,
    recorded,
    response_scores,
)
from alerting.scores.onset import highest_cusum, highest_mean
from alerting.scores.rauq import RauqHeads, rauq
from chaos.score.statistics import auroc
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS

LAYERS, HEADS, WIDTH = 6, 4, len(TOKEN_SIGNALS)
AT = {name: index for index, name in enumerate(TOKEN_SIGNALS)}


class World:
    """Draws answers: entropies that follow each other, heads that lean on shared moods of the answer."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        fixed = np.random.default_rng(99)
        self.mean = fixed.uniform(0.2, 0.8, (len(HEAD_SIGNALS), LAYERS, HEADS))
        self.moods = fixed.normal(0, 0.04, (3, len(HEAD_SIGNALS), LAYERS, HEADS))

    def answer(
        self,
        *,
        tokens: int = 20,
        doubt: float = 0.0,
        heads: float = 0.0,
        post: float = 0.0,
        sparse: bool = False,
    ) -> Response:
        """`doubt` raises entropies, `heads` moves the second layer's, `post` what the modifiers changed."""
        level, wave = self.rng.normal(0, 0.3), np.zeros(tokens)
        for i in range(1, tokens):
            wave[i] = 0.7 * wave[i - 1] + self.rng.normal(0, 0.3)
        entropy = np.exp(0.2 + level + wave + doubt)
        surprisal = entropy * self.rng.exponential(0.8, tokens)
        rows = np.ones((tokens, WIDTH))
        rows[:, AT["entropy"]], rows[:, AT["entropy_post"]] = entropy, entropy + post
        rows[:, AT["surprisal"]], rows[:, AT["surprisal_post"]] = surprisal, surprisal - post
        rows[:, AT["confidence"]], rows[:, AT["margin"]] = np.exp(-surprisal), 0.5
        mood = np.tensordot(self.rng.normal(0, 1, 3), self.moods, 1)
        layers = []
        for step in range(tokens):
            if sparse and step % 4:
                continue
            chosen = [*range(step // 4 % 2, LAYERS, 2)] if sparse else [*range(LAYERS)]
            values = self.mean + mood + self.rng.normal(0, 0.05, self.mean.shape)
            values[:, 1] += heads * (step > 0)
            layers.append(LayerRow(step, chosen, values[:, chosen].astype(np.float16)))
        return Response(rows, layers, 9)


@pytest.fixture(scope="module")
def frozen() -> Frozen:
    world = World(1)
    return fit([world.answer() for _ in range(200)])


def scores(frozen: Frozen | None, response: Response) -> dict[str, float]:
    return response_scores(response.tokens, response.layers, response.sentence, frozen)


def compare(frozen: Frozen, name: str, n: int = 60, sparse: bool = False, **fault: float) -> float:
    world = World(2)
    clean = [scores(frozen, world.answer(sparse=sparse))[name] for _ in range(n)]
    return auroc(clean, [scores(frozen, world.answer(sparse=sparse, **fault))[name] for _ in range(n)])  # type: ignore[arg-type]


def test_every_score_is_in_the_catalogue_and_says_what_it_needs(frozen: Frozen) -> None:
    response = World(3).answer()
    whole = scores(frozen, response)
    assert whole.keys() == SCORES.keys() - {"contrast"}
    assert all(math.isfinite(value) for value in whole.values())
    without = {
        "heads": scores(frozen, response._replace(layers=())),
        "frozen": scores(None, response),
    }
    rows = np.array(response.tokens)
    rows[:, [AT["surprisal_post"], AT["entropy_post"]]] = np.nan
    without["post"] = scores(frozen, response._replace(tokens=rows))
    for need, found in without.items():
        assert found.keys() == {name for name in whole if need not in SCORES[name].needs}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["heads", "heads_residual", "heads_onset", "heads_kl"])
def test_heads_that_moved_are_seen_from_all_rows_and_from_few(
    frozen: Frozen, name: str, sparse: bool
) -> None:
    assert compare(frozen, name, sparse=sparse, heads=0.2) > 0.9


@pytest.mark.parametrize("sparse", [False, True])
def test_heads_count_in_the_combination_where_health_was_sampled_alike(sparse: bool) -> None:
    world = World(1)
    frozen = fit([world.answer(sparse=sparse) for _ in range(200)])
    assert compare(frozen, "combined", sparse=sparse, heads=0.3) > 0.9


def test_heads_that_moved_down_are_seen_as_well(frozen: Frozen) -> None:
    assert compare(frozen, "heads", heads=-0.2) > 0.9


def test_what_health_varies_in_is_taken_out(frozen: Frozen) -> None:
    """A small move of one layer hides in the moods that all layers share, until these are taken out."""
    assert compare(frozen, "heads_residual", heads=0.04) > compare(frozen, "heads", heads=0.04) + 0.1


@pytest.mark.parametrize("name", ["sentence_entropy", "sentence_doubt", "cusum", "rauq", "combined"])
def test_doubt_is_seen(frozen: Frozen, name: str) -> None:
    assert compare(frozen, name, doubt=0.8) > 0.85


def test_an_entropy_that_falls_is_as_strange_as_one_that_rises(frozen: Frozen) -> None:
    assert compare(frozen, "entropy_shift", doubt=-1.5) > 0.9
    assert compare(frozen, "entropy_shift", doubt=1.5) > 0.9


def test_the_taps_differ_only_where_something_changed_the_logits(frozen: Frozen) -> None:
    assert compare(frozen, "tap_shift") == 0.5
    assert compare(frozen, "combined_tap", post=0.5) == 1.0
    assert compare(frozen, "tap_freeze", post=-0.5) == 1.0


def test_more_detail_than_the_baseline_saw_leaves_healthy_answers_healthy(frozen: Frozen) -> None:
    """Limits hold for answers with few sampled tokens too: the mean of few varies more, and is allowed to."""
    world = World(4)
    full = [scores(frozen, world.answer())["heads"] for _ in range(80)]
    few = [scores(frozen, world.answer(sparse=True))["heads"] for _ in range(80)]
    assert np.mean(few) == pytest.approx(np.mean(full), rel=0.15)


def test_a_contrast_learns_what_tells_two_kinds_apart() -> None:
    world = World(5)
    contrast = [(world.answer(heads=0.06 * bad), bool(bad)) for bad in (0, 1) * 40]
    taught = fit([world.answer() for _ in range(120)], contrast)
    assert compare(taught, "contrast", heads=0.06) > 0.9
    with pytest.raises(ValueError, match="both kinds"):
        fit([world.answer() for _ in range(40)], [(world.answer(), False)])


def test_a_frozen_model_survives_json(frozen: Frozen) -> None:
    again = msgspec.json.decode(msgspec.json.encode(frozen), type=Frozen)
    response = World(6).answer()
    assert scores(again, response) == scores(frozen, response)


@pytest.mark.parametrize(
    "change", [{"shape": [4, 1]}, {"type": "<f8"}, {"data": ""}, {"shape": [-1]}, {"shape": [10**6, 10**6]}]
)
def test_damaged_arrays_are_refused(frozen: Frozen, change: dict[str, object]) -> None:
    content = msgspec.json.decode(msgspec.json.encode(frozen))
    content["heads"]["mean"] |= change
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(content), type=Frozen)


EMPTY = [
    None,
    [],
    (),
    np.empty(0),
    np.empty((0, WIDTH)),
    [[None] * WIDTH],
    [[math.nan] * WIDTH],
    [[math.inf] * WIDTH],
]


@pytest.mark.parametrize("tokens", EMPTY, ids=repr)
@pytest.mark.parametrize("layers", [None, [], [None]], ids=repr)
def test_nothing_usable_gives_no_score(frozen: Frozen, tokens: object, layers: object) -> None:
    assert response_scores(tokens, layers, None, frozen) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [True, 1, 0.5, np.float32(0.5), np.float16(0.5)], ids=repr)
@pytest.mark.parametrize("absent", [None, math.nan, math.inf], ids=repr)
def test_numbers_of_any_type_count_and_absent_ones_do_not(
    frozen: Frozen, value: object, absent: object
) -> None:
    row: list[object] = [value] * WIDTH
    odd = list(row)
    odd[AT["margin"]] = odd[AT["entropy_post"]] = absent
    whole, part = (response_scores([r] * 3, (), 2, frozen) for r in (row, odd))
    assert part.keys() == whole.keys() - {"tap_shift", "tap_freeze", "combined_tap"} - {
        "response_closeness",
        "sentence_closeness",
    }
    assert all(part[name] == whole[name] for name in part)
    lacking = list(row)
    lacking[AT["confidence"]] = absent
    assert response_scores([row, lacking, row, row], (), 2, frozen) == whole


@pytest.mark.parametrize("heads", [None, [], np.empty((5, 0, 4)), np.full((5, 2, 4), np.nan)], ids=repr)
def test_empty_detail_is_no_detail(frozen: Frozen, heads: object) -> None:
    assert layer_row(1, [0, 1], heads) is None
    tokens = World(7).answer().tokens
    row = LayerRow(1, [0, 1], heads)  # type: ignore[arg-type]
    assert response_scores(tokens, [row], 5, frozen) == response_scores(tokens, (), 5, frozen)


def test_a_head_that_is_absent_speaks_for_nothing(frozen: Frozen) -> None:
    response = World(8).answer()
    holes = [
        row._replace(heads=np.where(np.arange(HEADS) == 2, np.nan, row.heads)) for row in response.layers
    ]
    found = scores(frozen, response._replace(layers=holes))
    assert all(math.isfinite(value) for value in found.values())
    assert found["heads"] == pytest.approx(scores(frozen, response)["heads"], rel=0.5)


def test_records_read_back_as_the_same_rows() -> None:
    row = World(9).answer(tokens=3).layers[2]
    flat = {name: [float(v) for v in row.heads[i].ravel()] for i, name in enumerate(HEAD_SIGNALS)}
    again = recorded({"step": 2, "layers": list(row.layers), "heads": HEADS, **flat})
    assert again is not None
    assert np.array_equal(again.heads, row.heads)
    assert recorded({"step": 2, "layers": [0], "heads": HEADS, "head_kl": None}) is None


def test_wrong_shapes_are_named(frozen: Frozen) -> None:
    with pytest.raises(ValueError, match="token rows have 7 signals"):
        response_scores([[1.0, 2.0]], (), None, frozen)
    with pytest.raises(ValueError, match=r"head signals are \[5, 2, heads\]"):
        layer_row(1, [0, 1], np.ones((5, 3, 4)))
    other = LayerRow(1, [LAYERS], np.ones((5, 1, HEADS)))
    with pytest.raises(ValueError, match="another model"):
        response_scores(World(1).answer().tokens, [other], None, frozen)


def test_too_few_responses_are_refused() -> None:
    with pytest.raises(FitError, match="no healthy responses"):
        fit([World(1).answer()])


def test_highest_mean_and_cusum_by_hand() -> None:
    values = np.array([0.0, 3.0, 3.0, -9.0, 1.0, 2.0])
    assert highest_mean(values, 2) == 3.0
    assert highest_mean(values, 9) == 0.0
    assert highest_mean(np.empty(0), 3) == 0.0
    assert highest_cusum(values, 1.0) == 4.0
    assert highest_cusum(-np.ones(4), 0.0) == 0.0


def test_rauq_by_hand() -> None:
    heads = RauqHeads(first=1, heads=[0, 2], attention=[0.5, 0.1])
    confidence = np.array([0.8, 0.6])
    known = [None, np.array([0.9, 0.2])]
    carried = [0.5 * 0.6 + 0.5 * a * 0.8 for a in (0.9, 0.2)]
    expected = max(-(math.log(0.8) + math.log(c)) / 2 for c in carried)
    assert rauq(heads, confidence, known) == pytest.approx(expected)
