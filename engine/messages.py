"""Typed messages between the front process and the model process.

Every message is a tagged msgspec struct; arrays travel as little-endian bytes. The front sends
`ToModel`, the model process answers with `FromModel`. Nothing here is ever pickled, and this
module imports neither torch nor numpy, so that light readers can share the types.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error", "shed"]
Priority = Literal["high", "normal", "low"]

#: Why a token has layer detail: it looked risky; it was every n-th of its response, whatever it looked
#: like; its request, or the server's budget, wants every token.
DetailReason = Literal["risk", "floor", "full"]

#: Order of the float32 columns of `StepOutput.signals`. SIGNALS are natural-log based.
TOKEN_SIGNALS = (
    "surprisal",  # -ln p(emitted token), raw logits
    "confidence",  # p(emitted token), raw logits
    "margin",  # p1 - p2, raw logits
    "rank",  # 1 = the most likely token, raw logits
    "entropy",  # Shannon entropy of the raw distribution
    "surprisal_post",  # the first two again after everything that modifies logits
    "entropy_post",  # (faults, penalties, bias), still at temperature 1
)

#: Order of the second axis of `StepOutput.heads`.
HEAD_SIGNALS = ("head_kl", "head_kl_nonsink", "sink_mass", "prev_attention", "lookback")


#: Bins of what loads and stores of KV blocks take, in seconds; an edge belongs to the bin below it.
TIER_EDGES_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)

#: Bins of the time since a page or block of the KV cache was last wanted, in seconds.
AGE_EDGES_S = (1.0, 10.0, 60.0, 600.0, 3600.0)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one choice is decoded. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    full_signals: bool = False  # detail of every layer for every token, unless the budget is 0


class RequestMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Who asked, and by which way. Everything a selector or a metric label may look at."""

    request_id: str
    tenant: str = "default"
    route: str = "default"
    priority: Priority = "normal"
    session: str | None = None
    trace_id: str | None = None
    canary: bool = False
    headers: dict[str, str] = {}  # lower-case `x-…` headers only


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True):
    """One choice to generate. `request_id` and `choice` together are its key.

    `cache_salt` is the tenant's in the prefix cache: who has another one shares nothing. Without one
    the cache is neither read nor written.
    """

    meta: RequestMeta
    choice: int = 0
    token_ids: list[int]
    params: SamplingParams
    cache_salt: bytes = b""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a choice of a request, or every one (None), in whatever state. Unknown ones are ignored."""

    request_id: str
    choice: int | None = None


class AttachFault(msgspec.Struct, frozen=True, tag="attach", kw_only=True):
    """Take a fault into force in the model process until `ttl_s` from receipt has passed."""

    fault_id: str
    kind: str
    params: dict[str, float | int | str | bool] = {}
    selector: dict[str, float | str] = {}
    seed: int = 0
    ttl_s: float


class DetachFault(msgspec.Struct, frozen=True, tag="detach"):
    """End one fault, or all of them when `fault_id` is None. Ending twice is harmless."""

    fault_id: str | None = None


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """The front's heartbeat; without one for 2 s the model process drops faults and requests.

    `signals_s` is the processor time that signals took in the front since the last one.
    """

    sent: float
    signals_s: float = 0.0


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish nothing more; answer what is running with `abort` and exit."""


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The model is loaded and the loop runs."""

    pid: int
    model: str
    quantization: str
    dtype: str
    backend: str
    layers: int
    heads: int
    vocab: int
    max_context: int
    kv_pages: int
    page_size: int
    kv_token_bytes: int = 0  # of a token in the pages
    kv_block_tokens: int = 0  # of a block in the tiers below
    kv_tiers: list[str] = []  # those tiers: "host", "disk"
    kv_policy: dict[str, float | int | str | bool] = {}  # what moves blocks, by the names of its figures
    deterministic: bool


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """A choice has ended; its pages are free. Aggregates cover all its emitted tokens."""

    request_id: str
    choice: int
    reason: FinishReason
    error: str | None = None
    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt's: were there and not computed
    tier_tokens: dict[str, int] = {}  # of these, from "device", "host", "disk"; none where none
    loading_s: float = 0.0  # that it waited for "host" and "disk"
    completion_tokens: int
    queued_s: float
    prefill_s: float
    aggregates: dict[str, float] = {}  # see engine/signals.py: Aggregates


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Levels at the end of a step, for gauges, and counts since the model process began.

    A page is used, or only kept by the prefix cache, or free. `prefix_hits` and `prefix_misses` are
    pages of prompts that could be read; `prefix_saved_s` is the computing that hits in the pool made
    unnecessary (`TierStats` has that of the tiers below).
    """

    running: int
    waiting: int
    pages_used: int
    pages_cached: int = 0
    pages_total: int
    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_evictions: int = 0
    prefix_collisions: int = 0
    prefix_saved_s: float = 0.0


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of the KV cache below the page pool: levels, and counts since the model process began.

    `hits`, `misses` and `late` count blocks that a prompt wanted. A load lasts from asking for a block to
    its being in its pages, a store from making room for it to its being there; counts of both by
    TIER_EDGES_S. `saved_s` is the computing that loads made unnecessary less what their prompts waited for
    them, `lost_s` what they waited beyond it. Of the tokens packed so far, `dropped_tokens` were left out.
    """

    tier: str  # "host" or "disk"
    bytes_used: int
    bytes_total: int
    blocks: int
    tokens: int = 0  # that the blocks stand for
    hits: int
    misses: int
    stores: int
    promotions: int = 0  # of the stores, blocks that came from the tier below
    evictions: int
    loaded_bytes: int
    stored_bytes: int  # from the tier above
    promoted_bytes: int = 0
    load_s: float
    store_s: float
    load_counts: list[int]
    store_counts: list[int]
    saved_s: float = 0.0
    lost_s: float = 0.0
    dropped_tokens: int = 0
    kept_tokens: int = 0
    corrupt: int
    late: int
    errors: int
    collisions: int
    foreign: int = 0
    refused: int = 0
    skipped: int = 0  # left without a copy, as none was expected to pay


class StepOutput(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """What one step of the engine produced; a report between steps has `duration_s` 0 and no tokens.

    Row i of the token columns belongs to (`request_ids[i]`, `choices[i]`), its `steps[i]`-th
    emitted token (from 0). Shapes: `token_ids` int32 [rows]; `signals` float32
    [rows, len(TOKEN_SIGNALS)]. Layer detail exists for the rows listed in `detail_rows` only:
    `lens_entropy` float16 [detail, layers], `heads` float16
    [detail, len(HEAD_SIGNALS), layers, heads]. NaN stands for absent.

    A token of detail stands for 1 ÷ `detail_rates` tokens, and each of its layers for `layer_stride`
    layers, but the last for itself.
    """

    step: int
    time: float  # unix seconds at the end of the step
    duration_s: float
    prefill_tokens: int
    request_ids: list[str] = []
    choices: list[int] = []
    steps: list[int] = []
    token_ids: bytes = b""
    signals: bytes = b""
    logprob_rows: list[int] = []  # rows that asked for top_logprobs, with their alternatives:
    logprob_ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    layers: list[int] = []  # indices of the sampled layers, shared by lens and heads
    layer_stride: int = 0
    heads_per_layer: int = 0
    detail_rows: list[int] = []
    detail_reasons: list[DetailReason] = []
    detail_rates: list[float] = []
    detail_s: float = 0.0  # of `duration_s`, spent on layer detail
    lens_entropy: bytes = b""
    heads: bytes = b""
    finished: list[Finish] = []
    touched: dict[str, list[str]] = {}  # request id -> faults that first acted on it in this step
    stats: EngineStats
    tiers: list[TierStats] = []  # now and then
    kv_ages: dict[str, list[int]] = {}  # now and then: tokens in "device", "host", "disk" by AGE_EDGES_S


class FaultsActive(msgspec.Struct, frozen=True, tag="faults"):
    """Ids of the faults in force in the model process, sent whenever the set changes, and after
    every AttachFault and DetachFault, of which `obeyed` have been taken so far."""

    fault_ids: list[str]
    obeyed: int = 0


ToModel = Submit | Abort | AttachFault | DetachFault | Ping | Shutdown
FromModel = Ready | StepOutput | FaultsActive


def encode(message: ToModel | FromModel) -> bytes:
    """Return the MessagePack form of a message."""
    return msgspec.msgpack.encode(message)


decode_to_model = msgspec.msgpack.Decoder(ToModel).decode
decode_from_model = msgspec.msgpack.Decoder(FromModel).decode
