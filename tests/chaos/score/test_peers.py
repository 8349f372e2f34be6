"""EPR on numbers, and our scores beside lm-polygraph's own, of the same answers."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from alerting.scores import LayerRow
from alerting.scores.rauq import attention_of, fit_rauq, rauq
from alerting.scores.tokens import token_scores
from chaos.score.peers import EPR_TOP, LIBRARY, Polygraph, epr, version
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS

LAYERS, HEADS, VOCABULARY, TOKENS = 6, 3, 40, 9


def test_epr_is_the_entropy_of_the_most_likely_tokens() -> None:
    even = [math.log(1 / EPR_TOP)] * EPR_TOP
    assert epr([even]) == pytest.approx(math.log(EPR_TOP))
    assert epr([[0.0], even]) == pytest.approx(math.log(EPR_TOP) / 2)
    rest = [math.log(0.02)] * 20
    assert epr([rest]) == pytest.approx(-EPR_TOP * 0.02 * math.log(0.02))


@pytest.fixture(scope="module")
def polygraph():
    if version() is None:
        pytest.skip("lm-polygraph is not installed")
    with warnings.catch_warnings():  # of what it imports
        warnings.simplefilter("ignore")
        return Polygraph(LAYERS, HEADS)


@pytest.fixture
def answer():
    """Token ids, log-probabilities [tokens, vocabulary], attention to the token before, its layer rows."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (TOKENS, VOCABULARY))
    log_probs = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    previous = rng.random((TOKENS, LAYERS, HEADS)).astype(np.float16)
    previous[:, LAYERS * 2 // 3] = previous[:, LAYERS // 3]  # the library looks at one layer more than we
    heads = np.zeros((TOKENS, len(HEAD_SIGNALS), LAYERS, HEADS), np.float16)
    heads[:, HEAD_SIGNALS.index("prev_attention")] = previous
    rows = [LayerRow(step, range(LAYERS), part) for step, part in enumerate(heads)]
    return log_probs.argsort(1)[:, -3].tolist(), log_probs, previous, rows


def test_ours_are_the_librarys_where_both_have_them(polygraph, answer) -> None:
    ids, log_probs, previous, rows = answer
    found = polygraph.scores(ids, log_probs, previous)
    own = log_probs[np.arange(TOKENS), ids]
    tokens = np.ones((TOKENS, len(TOKEN_SIGNALS)))
    tokens[:, TOKEN_SIGNALS.index("surprisal")] = -own
    tokens[:, TOKEN_SIGNALS.index("entropy")] = -(np.exp(log_probs) * log_probs).sum(1)
    ours = token_scores(tokens, TOKENS)
    assert found[f"{LIBRARY}: Perplexity"] == pytest.approx(ours["response_surprisal"], rel=1e-5)
    assert found[f"{LIBRARY}: MeanTokenEntropy"] == pytest.approx(ours["response_entropy"], rel=1e-5)
    assert found[f"{LIBRARY}: MaximumSequenceProbability"] == pytest.approx(-own.sum(), rel=1e-5)
    # its heads are picked with the whole answer in view, and it counts from 1
    picked = fit_rauq([rows[1:]], (len(HEAD_SIGNALS), LAYERS, HEADS))
    mine = rauq(picked, np.exp(own), [attention_of(picked, row) for row in rows])
    assert found[f"{LIBRARY}: RAUQ"] == pytest.approx(1 + mine, rel=1e-3)


def test_an_answer_of_one_token_has_finite_scores(polygraph, answer) -> None:
    ids, log_probs, previous, _ = answer
    found = polygraph.scores(ids[:1], log_probs[:1], previous[:1])
    assert len(found) >= 7 and all(np.isfinite(list(found.values())))
