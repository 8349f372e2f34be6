"""The shapes of the engine's answers: every field the dashboard reads, declared once.

Unknown fields are ignored and absent ones take their defaults, so that a newer or older engine
still shows what it can.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
HEAD_COLUMNS = ("head_kl", "head_kl_nonsink", "sink_mass", "prev_attention", "lookback")


def read(body: bytes, kind: type[T]) -> T:
    """Return a JSON answer as `kind`; raises ValueError that names the field at fault."""
    return msgspec.convert(msgspec.json.decode(body), kind, dec_hook=_decode, strict=False)


class Instant(float):
    """Unix seconds; read from a number or an ISO 8601 string."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    ready: bool = False
    uptime_s: float | None = None
    engine: dict[str, Any] = {}
    chaos: dict[str, Any] = {}
    versions: dict[str, Any] = {}


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """One value a second and series; None where there was no traffic."""

    time: list[Instant] = []
    series: dict[str, list[float | None]] = {}


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    level: str = ""
    route: str | None = None
    severity: str | None = None
    summary: str = ""
    team: str | None = None
    starts_at: Instant | None = msgspec.field(name="startsAt", default=None)
    ends_at: Instant | None = msgspec.field(name="endsAt", default=None)
    state: str = "firing"
    evidence: dict[str, Any] = {}


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One alert as the webhook receiver got it."""

    received: Instant | None = None
    source: str = ""
    status: str = ""
    labels: dict[str, str] = {}
    starts_at: Instant | None = msgspec.field(name="startsAt", default=None)


class Breaker(msgspec.Struct, frozen=True, kw_only=True):
    """The breaker of one route: closed, open or half_open; `mode` is observe or enforce."""

    state: str = "closed"
    mode: str = "observe"
    since: Instant | None = None


class Alerts(msgspec.Struct, frozen=True, kw_only=True):
    active: list[Alert] = []
    history: list[Alert] = []
    webhook: list[Notice] = []
    breaker: dict[str, Breaker] = {}
    evaluator: dict[str, Any] = {}

    @property
    def blind(self) -> str | None:
        """Why nothing can fire, with its mend; None when the evaluator sees."""
        return self.evaluator.get("baseline_problem")

    def heard(self, alert: Alert) -> Notice | None:
        """Return the first notification of an alert that reached the webhook."""
        for notice in reversed(self.webhook):
            same = notice.labels.get("alertname") == alert.name and notice.labels.get("route") == alert.route
            if same and notice.starts_at == alert.starts_at:
                return notice
        return None

    def all(self) -> list[Alert]:
        """Return the alerts that fire, then past ones, each once, the newest first."""
        seen = {(a.name, a.route, a.starts_at): a for a in [*self.history, *self.active]}
        order = sorted(seen.values(), key=lambda a: (a.state == "firing", a.starts_at or 0.0))
        return order[::-1]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request; the fields of `telemetry.record.REQUESTS`."""

    request_id: str
    trace_id: str | None = None
    session: str | None = None
    tenant: str = "default"
    route: str = "default"
    canary: bool = False
    endpoint: str = ""
    stream: bool = False
    model: str = ""
    quantization: str | None = None
    started: Instant | None = None
    ended: Instant | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    temperature: float | None = None
    queued_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    duration_s: float | None = None
    token_times_s: list[float] | None = None
    finish_reason: str = ""
    disconnected: bool = False
    error: str | None = None
    kv_hit_device: int | None = None
    kv_hit_host: int | None = None
    kv_hit_disk: int | None = None
    kv_hit_ratio: float | None = None
    kv_wait_s: float | None = None
    aggregates: dict[str, float | None] | None = None
    faults: list[str] | None = None
    alerts: list[str] | None = None
    outcome: str | None = None
    prompt: str | None = None
    output: str | None = None


class LayerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled layer detail of one token: `lens_entropy` [layers], head columns [layers, heads].

    The token stands for 1 ÷ `rate` tokens; `reason` says why it was sampled.
    """

    step: int
    choice: int = 0
    layers: list[int] = []
    reason: str | None = None
    rate: float | None = None
    lens_entropy: list[float | None] | None = None
    head_kl: list[Any] | None = None
    head_kl_nonsink: list[Any] | None = None
    sink_mass: list[Any] | None = None
    prev_attention: list[Any] | None = None
    lookback: list[Any] | None = None

    def heads(self, column: str, heads: int) -> list[list[float | None]]:
        """Return a head column as one list of `heads` values a layer; [] when absent."""
        values = getattr(self, column) or []
        if values and isinstance(values[0], list):
            return values
        return [values[at : at + heads] for at in range(0, len(values), heads)] if heads else []


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of the KV cache. `counts` since the server began, `rates` a second over the last minute,
    `ages` in tokens; of the device in pages, of the tiers below in blocks."""

    tier: str
    bytes_used: int = 0
    bytes_total: int = 0
    tokens: int = 0
    blocks: int | None = None
    compression_ratio: float | None = None
    load_s: float | None = None
    store_s: float | None = None
    ages: list[int] = []
    counts: dict[str, float] = {}
    rates: dict[str, float] = {}


class Tiers(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache by tier, the nearest first; `waited` prompts a second waited `wait_s` for one below."""

    time: Instant | None = None
    window_s: float = 60.0
    waited: float = 0.0
    wait_s: float | None = None
    page_tokens: int = 0
    block_tokens: int = 0
    age_edges_s: list[float] = []
    policy: dict[str, Any] = {}
    tiers: list[Tier] = []

    def find(self, name: str) -> Tier | None:
        """Return a tier, if there is one of that name."""
        return next((tier for tier in self.tiers if tier.tier == name), None)


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    """Layer detail of a request; `layers` are those that any of its tokens has."""

    layers: list[int] = []
    heads: int = 0
    rows: list[LayerRow] = []


class Span(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    start: Instant | None = None
    end: Instant | None = None
    span_id: str | None = None
    parent: str | None = None
    attributes: dict[str, Any] = {}


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """A request with its tokens (columns of `telemetry.record.TOKENS`), layers and spans."""

    request: Request
    tokens: dict[str, list[Any]] = {}
    layers: Layers = Layers()
    spans: list[Span] = []

    def choices(self) -> list[int]:
        """Return the numbers of the choices that emitted tokens, in order."""
        return sorted(set(self.tokens.get("choice", [])))

    def only(self, choice: int) -> Detail:
        """Return the same request with the tokens and layers of one choice."""
        keep = [index for index, number in enumerate(self.tokens.get("choice", [])) if number == choice]
        tokens = {name: [column[index] for index in keep] for name, column in self.tokens.items() if column}
        rows = [row for row in self.layers.rows if row.choice == choice]
        layers = msgspec.structs.replace(self.layers, rows=rows)
        return msgspec.structs.replace(self, tokens=tokens, layers=layers)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A fault in force."""

    id: str = msgspec.field(name="fault_id")
    kind: str
    params: dict[str, Any] = {}
    selector: dict[str, Any] = {}
    ttl_s: float | None = None
    remaining_s: float | None = None
    started: Instant | None = None
    scope: str | None = None
    touched: int | None = None
    stop: dict[str, Any] = {}


class Param(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a kind of fault."""

    name: str
    type: str = "number"  # number | integer | boolean | string
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    choices: list[Any] = []
    description: str = ""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of fault: what it does, what it should move, its parameters as a JSON schema, and the
    parameters that turn it into its harmless control."""

    kind: str
    title: str = ""
    description: str = ""
    scope: str = "request"
    moves: list[str] = []
    control: dict[str, Any] = {}
    params: dict[str, Any] = {}

    def parameters(self) -> list[Param]:
        """Return the parameters in the order of the schema."""
        return [_param(name, field) for name, field in self.params.get("properties", {}).items()]


class Lever(msgspec.Struct, frozen=True, kw_only=True):
    blocked: bool = False
    reason: str | None = None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the chaos journal."""

    time: Instant
    event: str
    id: str | None = msgspec.field(name="fault_id", default=None)
    kind: str | None = None
    params: dict[str, Any] = {}
    selector: dict[str, Any] = {}
    ttl_s: float | None = None
    reason: str | None = None
    touched: int | None = None
    by: str | None = None
    state: str | None = None
    why: str | None = None
    text: str | None = None


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """Of `recent` requests, `admitted` satisfy the selector; with its share, about `expected`."""

    recent: int = 0
    admitted: int = 0
    expected: float = 0.0


class Chaos(msgspec.Struct, frozen=True, kw_only=True):
    enabled: bool = False
    caps: dict[str, float] = {}
    faults: list[Lease] = []
    kinds: list[Kind] = []
    lever: Lever = Lever()
    journal: list[Entry] = []


def _param(name: str, field: dict[str, Any]) -> Param:
    default = field.get("default")
    return Param(
        name=name,
        type=field.get("type") or ("string" if isinstance(default, str) else "number"),
        default=default,
        minimum=_number(field.get("minimum", field.get("exclusiveMinimum"))),
        maximum=_number(field.get("maximum", field.get("exclusiveMaximum"))),
        choices=field.get("enum", []),
        description=field.get("description", ""),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _decode(kind: type, value: Any) -> Any:
    if kind is not Instant:
        raise NotImplementedError(kind)
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        value = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return Instant(value)
