"""From the chunks of a plan to the tensors of one model call."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.llama import Batch, Detail, Prefill
from engine.scheduler import Chunk, Sequence


def batch_of(chunks: list[Chunk], layers: list[int], detailed: list[Sequence], page_size: int) -> Batch:
    """Lay `chunks` out as one batch, decodes first as the plan has them.

    `detailed` are the emitting sequences that get detail of `layers`.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: dict[tuple[str, int], int] = {}  # place of each emitting sequence's last token
    decodes: list[Sequence] = []
    prefills: list[Prefill] = []
    for chunk in chunks:
        sequence, stop = chunk.sequence, chunk.start + chunk.count
        if chunk.count == 1 and not prefills:
            decodes.append(sequence)
        else:
            table = torch.tensor([sequence.pages[: -(-stop // page_size)]])
            prefills.append(Prefill(len(tokens), chunk.count, chunk.start, table))
        tokens += sequence.tokens[chunk.start : stop]
        positions += range(chunk.start, stop)
        slots += [
            sequence.pages[p // page_size] * page_size + p % page_size for p in range(chunk.start, stop)
        ]
        if chunk.emits:
            ends[sequence.key] = len(tokens) - 1
    return Batch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        decode_table=_table(decodes, page_size),
        decode_lengths=torch.tensor([s.computed + 1 for s in decodes], dtype=torch.int64),
        prefills=prefills,
        rows=torch.tensor(list(ends.values()), dtype=torch.int64),
        detail=Detail(
            layers=layers,
            tokens=torch.tensor([ends[s.key] for s in detailed]),
            table=_table(detailed, page_size),
            lengths=torch.tensor([len(s.tokens) for s in detailed]),
            prompt_lengths=torch.tensor([s.prompt_length for s in detailed]),
        )
        if detailed
        else None,
    )


def _table(sequences: list[Sequence], page_size: int) -> Tensor:
    """Block table [sequences, pages of the longest context], padded with page 0."""
    used = [s.pages[: -(-len(s.tokens) // page_size)] for s in sequences]
    width = max(map(len, used), default=0)
    return torch.tensor([pages + [0] * (width - len(pages)) for pages in used], dtype=torch.int64)
