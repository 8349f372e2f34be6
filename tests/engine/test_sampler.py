"""Greedy, temperature, top-k, top-p, penalties, seeds."""

from __future__ import annotations

import pytest
import torch

from engine import sampler
from engine.kernels import reference
from engine.messages import SamplingParams

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 0.0])


def sample(
    logits: torch.Tensor, params: list[SamplingParams], sources: list[torch.Generator | None]
) -> list[int]:
    return sampler.sample(logits, params, sources, reference.draw)


def draws(count: int = 4000, **values: object) -> torch.Tensor:
    params = SamplingParams(**values)
    source = torch.Generator().manual_seed(1)
    rows = [torch.tensor(sample(LOGITS[None], [params], [source])) for _ in range(count)]
    return torch.cat(rows).bincount(minlength=5) / count


def test_zero_temperature_is_greedy_and_needs_no_randomness() -> None:
    params = SamplingParams(temperature=0.0)
    assert sampler.generator(params, 0) is None
    assert sample(LOGITS[None], [params], [None]) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    assert (draws(temperature=temperature) - expected).abs().max() < 0.035


def test_top_k_keeps_the_best_and_renormalises() -> None:
    shares = draws(temperature=1.0, top_k=2)
    expected = LOGITS[[1, 3]].softmax(-1)
    assert shares[[0, 2, 4]].sum() == 0
    assert (shares[[1, 3]] - expected).abs().max() < 0.035


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    probabilities = LOGITS.softmax(-1)
    assert draws(temperature=1.0, top_p=float(probabilities[1]) - 1e-3)[1] == 1
    shares = draws(temperature=1.0, top_p=float(probabilities[1]) + 1e-3)
    assert set(shares.nonzero().flatten().tolist()) == {1, 3}


def test_the_same_seed_draws_the_same_and_choices_differ() -> None:
    params = SamplingParams(temperature=1.0, seed=11)

    def sequence(choice: int) -> list[int]:
        source = sampler.generator(params, choice)
        return [sample(LOGITS[None], [params], [source])[0] for _ in range(30)]

    assert sequence(0) == sequence(0)
    assert sequence(0) != sequence(1)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    rows = torch.stack((LOGITS, LOGITS.flip(0), LOGITS * 3))
    many = sample(rows, [params] * 3, [sampler.generator(params, i) for i in range(3)])
    for i in range(3):
        alone = sample(rows[i : i + 1], [params], [sampler.generator(params, i)])
        assert alone[0] == many[i]


def test_penalties_and_bias() -> None:
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={4: 3.0}
    )
    before = LOGITS.clone()
    got = sampler.adjust(LOGITS, params, prompt=[2], answer=[1, 1])
    assert torch.equal(before, LOGITS)
    assert got.tolist() == pytest.approx([0.5, 2.0 / 2 - 0.25 - 1.0, -1.0 * 2, 1.5, 3.0])
    assert sampler.changes_logits(params)
    assert not sampler.changes_logits(SamplingParams())
