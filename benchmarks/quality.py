"""What fewer bits cost: perplexity and the likeliest token, against float32 on the same text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.rows import Peers, Variant, console
from benchmarks.text import Text

#: A name, who is asked, and the arguments of its `score`.
Asked = tuple[str, Variant, dict[str, Any]]
#: The name of what bfloat16 alone loses.
FLOOR = "bf16, reference kernels"


@dataclass(frozen=True)
class Quality:
    """Perplexity, and the share of places whose likeliest token is another than with float32."""

    perplexity: float
    perplexity_ratio: float  # to float32's
    top1_disagreement: float


def of(answer: dict[str, Any], reference: dict[str, Any]) -> Quality:
    """Judge the answer of `Subject.score` by that of float32 on the same windows."""
    lost = -float(np.mean(answer["logprobs"]))
    least = -float(np.mean(reference["logprobs"]))
    differs = np.asarray(answer["top1"]) != np.asarray(reference["top1"])
    return Quality(math.exp(lost), math.exp(lost - least), float(differs.mean()))


def judge(
    peers: Peers,
    reference: Variant,
    asked: Sequence[Asked],
    text: Text,
    most: int,
) -> dict[str, dict[str, float]]:
    """Score `most` windows with everyone who is `asked`; float32 is the `reference`."""
    windows = text.windows(most)
    console.print(f"[dim]quality: {len(windows)} windows with {reference.name}")
    with peers.fresh(reference) as peer:
        whole = peer.ask("score", windows=windows)
    found = {"float32": asdict(of(whole, whole))}
    for name, variant, how in asked:
        console.print(f"[dim]quality: {name}")
        found[name] = asdict(of(peers.of(variant).ask("score", windows=windows, **how), whole))
    return found


def deltas(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """What our 8 bits lose beyond bfloat16's own loss, by the worse of both ways through the kernels."""
    ours = [quality for name, quality in found.items() if name.startswith("ours 8-bit")]
    if not ours:
        return {}
    floor = found[FLOOR]
    return {
        "perplexity_delta": max(q["perplexity_ratio"] for q in ours) - floor["perplexity_ratio"],
        "top1_delta": max(q["top1_disagreement"] for q in ours) - floor["top1_disagreement"],
    }
