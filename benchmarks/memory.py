"""What each engine keeps in memory."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import Peers, Variant, console
from benchmarks.speed import PROMPT
from benchmarks.text import Text


def measure(peers: Peers, variants: Sequence[Variant], text: Text) -> dict[str, float]:
    """Resident MB of a fresh process after a prompt of 512 tokens and 8 steps of a batch of 16.

    The interpreter and its libraries are in it, as they are for whoever runs the engine.
    """
    found = {}
    for variant in variants:
        console.print(f"[dim]memory: {variant.name}")
        with peers.fresh(variant) as peer:
            peer.ask("prefill", prompt=text.prompt(512, 1), **variant.how)
            prompts = [text.prompt(PROMPT, number) for number in range(16)]
            peer.ask("prepare", prompts=prompts, steps=8, **variant.how)
            peer.ask("decode", steps=8, **variant.how)
            found[variant.name] = round(peer.ask("resident_mb"), 1)
    return found
