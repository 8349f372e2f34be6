"""From raw logits to the next token of each row.

Order: the fault hook (elsewhere), bias and penalties (`adjust`), then temperature, top-k, top-p
and the draw (`sample`, by the kernels' `draw`). A row's result depends on that row and its own
generator alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.messages import SamplingParams

#: `draw` of a kernel backend: logits [R, V] and, for each row, temperature, top_k, top_p, a uniform number.
Draw = Callable[[Tensor, list[float], list[int], list[float], list[float]], list[int]]


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
    logits: Tensor, params: Sequence[SamplingParams], sources: Sequence[torch.Generator | None], draw: Draw
) -> list[int]:
    """Draw one token per row of fp32 logits [R, V]. Rows without a source take the largest logit."""
    return draw(
        logits,
        [wanted.temperature for wanted in params],
        [wanted.top_k for wanted in params],
        [wanted.top_p for wanted in params],
        [0.0 if source is None else _uniform(source) for source in sources],
    )


def _uniform(source: torch.Generator) -> float:
    return float(torch.rand((), generator=source, dtype=torch.float64))
