"""The one schema of what Quaver records. Imports no torch, so that any reader can use it.

Three Arrow tables, columnar, each carrying `schema_version` in its metadata:

- `TOKENS`: one row per emitted token.
- `LAYERS`: one row per token whose layers and heads were sampled.
- `REQUESTS`: one row per finished request.

Absent is null, never 0; what a schema version adds is null in records of those before it. Entropies and
surprisals are in nats, times in seconds.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = "4"
_META = {"schema_version": SCHEMA_VERSION}

_KEY = [
    pa.field("request_id", pa.string(), nullable=False),
    pa.field("choice", pa.int16(), nullable=False),
    pa.field("step", pa.int32(), nullable=False),
]

TOKENS = pa.schema(
    [
        *_KEY,
        pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("surprisal", pa.float32()),
        pa.field("confidence", pa.float32()),
        pa.field("margin", pa.float32()),
        pa.field("rank", pa.int32()),
        pa.field("entropy", pa.float32()),
        pa.field("surprisal_post", pa.float32()),
        pa.field("entropy_post", pa.float32()),
        pa.field("token_id", pa.int32()),  # content capture only
        pa.field("text", pa.string()),  # content capture only
    ],
    metadata=_META,
)

#: Head columns are row-major [len(layers), heads] flattened; `lens_entropy` is [len(layers)]. Why a token
#: was sampled is its `reason` (risk | floor | full); it stands for 1 ÷ `rate` tokens, and each of its
#: layers for `stride` layers, the last for itself: since schema version 2.
LAYERS = pa.schema(
    [
        *_KEY,
        pa.field("layers", pa.list_(pa.int16()), nullable=False),
        pa.field("heads", pa.int16(), nullable=False),
        pa.field("lens_entropy", pa.list_(pa.float16())),
        pa.field("head_kl", pa.list_(pa.float16())),
        pa.field("head_kl_nonsink", pa.list_(pa.float16())),
        pa.field("sink_mass", pa.list_(pa.float16())),
        pa.field("prev_attention", pa.list_(pa.float16())),
        pa.field("lookback", pa.list_(pa.float16())),
        pa.field("reason", pa.string()),
        pa.field("rate", pa.float32()),
        pa.field("stride", pa.int16()),
    ],
    metadata=_META,
)

#: `kv_hit_*` are tokens of the prompt that were cached, by tier; all of them ÷ the prompt's are the
#: `kv_hit_ratio`, since schema version 3, whose `kv_hit_device` has those of every tier. What the prompt
#: waited for `host` and `disk` is its `kv_wait_s`: since schema version 4.
REQUESTS = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("trace_id", pa.string()),
        pa.field("session", pa.string()),
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("route", pa.string(), nullable=False),
        pa.field("canary", pa.bool_(), nullable=False),
        pa.field("endpoint", pa.string(), nullable=False),
        pa.field("stream", pa.bool_(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("quantization", pa.string()),
        pa.field("started", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("ended", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("completion_tokens", pa.int32(), nullable=False),
        pa.field("temperature", pa.float32()),
        pa.field("queued_s", pa.float32()),
        pa.field("prefill_s", pa.float32()),
        pa.field("first_token_s", pa.float32()),
        pa.field("duration_s", pa.float32(), nullable=False),
        pa.field("token_times_s", pa.list_(pa.float32())),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("disconnected", pa.bool_(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("kv_hit_device", pa.int32()),
        pa.field("kv_hit_host", pa.int32()),
        pa.field("kv_hit_disk", pa.int32()),
        pa.field("kv_hit_ratio", pa.float32()),
        pa.field("kv_wait_s", pa.float32()),
        pa.field("aggregates", pa.map_(pa.string(), pa.float32())),
        pa.field("faults", pa.list_(pa.string())),
        pa.field("alerts", pa.list_(pa.string())),
        pa.field("outcome", pa.string()),  # completed | interrupted | rejected | failed
        pa.field("prompt", pa.string()),  # content capture only
        pa.field("output", pa.string()),  # content capture only
    ],
    metadata=_META,
)

TABLES = {"tokens": TOKENS, "layers": LAYERS, "requests": REQUESTS}
