"""Every kind of fault, and how a request for one is read. Light: used by both processes."""

from __future__ import annotations

from typing import Any

import msgspec

from chaos.faults.absent_slot import AbsentSlot
from chaos.faults.authority import Authority
from chaos.faults.base import EncodingFault, Fault, PromptFault
from chaos.faults.citation import Citation
from chaos.faults.double_bos import DoubleBos
from chaos.faults.head_noise import HeadNoise
from chaos.faults.head_stuck import HeadStuck
from chaos.faults.hidden_noise import HiddenNoise
from chaos.faults.kv_flip import KvFlip
from chaos.faults.kv_roll import KvRoll
from chaos.faults.kv_rope import KvRope
from chaos.faults.kv_shift import KvShift
from chaos.faults.kv_swap import KvSwap
from chaos.faults.noise import Noise
from chaos.faults.premise import Premise
from chaos.faults.sampler import Sampler
from chaos.faults.slow_prefill import SlowPrefill
from chaos.faults.stream_cut import StreamCut
from chaos.faults.stream_delay import StreamDelay
from chaos.faults.stream_garble import StreamGarble
from chaos.faults.stream_stall import StreamStall
from chaos.faults.streams import StreamFault
from chaos.faults.telemetry_drop import TelemetryDrop
from chaos.faults.template import Template
from chaos.faults.tier_errors import DiskFull, DiskIo, DiskSlow
from chaos.faults.tier_flip import DiskFlip, HostFlip
from chaos.faults.tier_staging import DiskStaging
from chaos.faults.tier_stale import DiskStale
from chaos.faults.tier_torn import DiskTorn
from chaos.faults.truncation import Truncation
from engine.words import convert

PROMPT_KINDS: dict[str, type[PromptFault | EncodingFault]] = {
    kind.kind: kind for kind in (AbsentSlot, Authority, Premise, Citation, Truncation, Template, DoubleBos)
}
MODEL_KINDS: dict[str, type[Fault]] = {
    kind.kind: kind
    for kind in (
        *(
            SlowPrefill,
            KvFlip,
            HiddenNoise,
            KvShift,
            HeadNoise,
            KvRoll,
            KvRope,
            HeadStuck,
            KvSwap,
            Noise,
            Sampler,
        ),
        *(DiskSlow, DiskIo, DiskFull, DiskTorn, DiskStale, DiskFlip, HostFlip, DiskStaging),
    )
}
STREAM_KINDS: dict[str, type[StreamFault]] = {
    kind.kind: kind for kind in (StreamStall, StreamDelay, StreamGarble, StreamCut)
}
TELEMETRY_KINDS: dict[str, type[TelemetryDrop]] = {TelemetryDrop.kind: TelemetryDrop}
KINDS: dict[str, type[Fault]] = {**PROMPT_KINDS, **MODEL_KINDS, **STREAM_KINDS, **TELEMETRY_KINDS}


def parse_fault(kind: str, params: dict[str, Any] | None) -> Fault:
    """Return the validated fault; raises ValueError that says what is wrong and what there is."""
    cls = KINDS.get(kind)
    if cls is None:
        raise ValueError(f"unknown fault {kind!r}; there is {', '.join(KINDS)}")
    try:
        return convert(params or {}, cls)
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from None


def describe() -> list[dict[str, Any]]:
    """Return every kind as JSON: where it acts, what it moves, its control, its parameters' schema."""
    return [
        {
            "kind": cls.kind,
            "title": cls.title,
            "description": (cls.__doc__ or "").split("\n\n")[0],
            "place": cls.place,
            "scope": cls.scope,
            "order": cls.order,
            "moves": list(cls.moves),
            "control": cls.control,
            "params": msgspec.json.schema(cls)["$defs"][cls.__name__],
        }
        for cls in sorted(KINDS.values(), key=lambda cls: cls.order)
    ]
