"""From raw logits to the next token of each row.

Order: the fault hook (elsewhere), bias and penalties (`adjust`), then temperature, top-k, top-p
and the draw (`sample`). A row's result depends on that row and its own generator alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.messages import SamplingParams


def changes_logits(params: SamplingParams) -> bool:
    """Whether `adjust` has anything to do for these parameters."""
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
    )


def adjust(logits: Tensor, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Return one row of logits [V] with bias and penalties applied; the input is not written to.

    Presence and frequency count the answer's tokens; repetition divides (or, below zero,
    multiplies) the logits of tokens seen in prompt or answer.
    """
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *answer}))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if answer and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(answer)
        ids = torch.tensor(list(counts))
        times = torch.tensor(list(counts.values()), dtype=logits.dtype)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    return logits


def generator(params: SamplingParams, choice: int) -> torch.Generator | None:
    """Return the row's source of randomness; None for greedy decoding. Choices differ by seed."""
    if params.temperature == 0:
        return None
    source = torch.Generator()
    if params.seed is None:
        source.seed()
    else:
        source.manual_seed((params.seed + choice) % 2**63)
    return source


def sample(
    logits: Tensor, params: Sequence[SamplingParams], sources: Sequence[torch.Generator | None]
) -> Tensor:
    """Draw one token per row of fp32 logits [R, V]; returns int64 [R].

    Greedy rows take the largest logit; others invert the cumulative distribution of what
    temperature, top-k and top-p leave, at one uniform draw.
    """
    tokens = logits.argmax(-1)
    for row, source in enumerate(sources):
        if source is not None:
            tokens[row] = _draw(logits[row], params[row], source)
    return tokens


def _draw(logits: Tensor, params: SamplingParams, source: torch.Generator) -> Tensor:
    probabilities = (logits / params.temperature).softmax(-1)
    if 0 < params.top_k < logits.numel():
        cut = probabilities.topk(params.top_k).values[-1]
        probabilities = probabilities.where(probabilities >= cut, 0)
    if params.top_p < 1:
        probabilities = probabilities.where(_nucleus(probabilities, params.top_p), 0)
    cumulative = probabilities.double().cumsum(-1)
    point = torch.rand((), generator=source, dtype=torch.float64) * cumulative[-1]
    return torch.searchsorted(cumulative, point, right=True).clamp_max(logits.numel() - 1)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Mask of the smallest set of tokens whose renormalised probability reaches `top_p`."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    keep = torch.zeros_like(probabilities, dtype=torch.bool)
    keep[order] = before < top_p * ordered.sum()
    return keep
