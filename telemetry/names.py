"""The one place for names: metrics, span attributes, events, headers.

A metric has a Prometheus name, an OTLP name, a unit, labels and the place its numbers come from.
Names in `gen_ai.*` follow OpenTelemetry's GenAI conventions, `llm.*` the documents this project
started from; everything else is `quaver.*`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from engine.messages import TIER_EDGES_S


@dataclass(frozen=True)
class Metric:
    """One metric family. `name` is the Prometheus name without `_total`; `otel` the OTLP name."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: str
    source: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    otel_name: str | None = None

    @property
    def otel(self) -> str:
        """Name over OTLP: dots for namespaces, no unit suffix."""
        return self.otel_name or self.name.replace("_", ".", 1)


_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_LOG_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.2, 6.0, 8.0, 10.0)

INFERENCE_LATENCY = Metric(
    "llm_inference_latency_seconds",
    "histogram",
    "From arrival of a request to its last token.",
    "s",
    "RequestEnded.duration_s",
    ("model_name", "quantization"),
    tuple(0.1 * 2**k for k in range(10)),
    "llm.inference.latency",
)
REQUEST_DURATION = Metric(
    "gen_ai_server_request_duration_seconds",
    "histogram",
    "Time a request took in the server.",
    "s",
    "RequestEnded.duration_s",
    (*_GEN_AI, "error_type"),
    tuple(0.01 * 2**k for k in range(14)),
    "gen_ai.server.request.duration",
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "From arrival of a request to its first token.",
    "s",
    "RequestEnded.first_token_s",
    _GEN_AI,
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    "gen_ai.server.time_to_first_token",
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "Mean gap between the tokens of one request, after the first.",
    "s",
    "RequestEnded.token_times_s",
    _GEN_AI,
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    "gen_ai.server.time_per_output_token",
)

TOKEN_CONFIDENCE = Metric(
    "quaver_token_confidence",
    "histogram",
    "Probability the model gave each token it emitted.",
    "1",
    "StepOutput.signals",
    ("route",),
    (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95, 0.99, 1.0),
)
TOKEN_ENTROPY = Metric(
    "quaver_token_entropy",
    "histogram",
    "Shannon entropy of the raw output distribution.",
    "nat",
    "StepOutput.signals",
    ("route",),
    _LOG_BUCKETS,
)
TOKEN_SURPRISAL = Metric(
    "quaver_token_surprisal",
    "histogram",
    "Minus log-probability of each emitted token.",
    "nat",
    "StepOutput.signals",
    ("route",),
    _LOG_BUCKETS,
)
TOKEN_MARGIN = Metric(
    "quaver_token_margin",
    "histogram",
    "Probability of the first minus that of the second candidate.",
    "1",
    "StepOutput.signals",
    ("route",),
    (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95, 0.99, 1.0),
)

TOKENS = Metric("quaver_tokens", "counter", "Tokens processed.", "token", "StepOutput", ("route", "kind"))
TENANT_REQUESTS = Metric(
    "quaver_tenant_requests",
    "counter",
    "Requests by tenant.",
    "request",
    "RequestEnded",
    ("tenant", "outcome"),
)
RESPONSES = Metric(
    "quaver_responses",
    "counter",
    "Responses that ended, canaries apart.",
    "response",
    "RequestEnded, on_rejected",
    ("route", "outcome", "reason"),
)
INTERRUPTIONS = Metric(
    "quaver_interruptions",
    "counter",
    "Clients that hung up in mid-response.",
    "response",
    "RequestEnded.disconnected",
    ("route",),
)
CANARIES = Metric(
    "quaver_canaries",
    "counter",
    "Canary responses that ended.",
    "response",
    "RequestEnded",
    ("route", "outcome"),
)
FEEDBACK = Metric(
    "quaver_feedback",
    "counter",
    "Feedback of request owners.",
    "event",
    "POST /v1/feedback",
    ("route", "kind"),
)
ALERTED = Metric(
    "quaver_alerted_responses",
    "counter",
    "Alerts raised against single responses.",
    "event",
    "Telemetry.alert_raised",
    ("name",),
)
DROPPED = Metric(
    "quaver_telemetry_dropped",
    "counter",
    "Telemetry that was lost: rows, spans, exports or calls.",
    "item",
    "writer, exporters, sinks",
    ("what",),
)
SINK_ERRORS = Metric(
    "quaver_sink_errors", "counter", "Exceptions a signal sink raised.", "error", "hub", ("sink",)
)

MEAN_CONFIDENCE = Metric(
    "quaver_joint_mean_confidence",
    "gauge",
    "Mean confidence of the tokens of the last 100 ms that had any; route `all` is the server.",
    "1",
    "joint windows",
    ("route",),
)
RESPONSE_ENTROPY = Metric(
    "quaver_joint_response_entropy",
    "gauge",
    "Mean over running responses of their running mean entropy, every 500 ms.",
    "nat",
    "joint windows",
    ("route",),
)
INTERRUPTION_RATE = Metric(
    "quaver_joint_interruption_rate",
    "gauge",
    "Share of the responses ended in the window whose client hung up, every 1 s.",
    "1",
    "joint windows",
    ("route",),
)
JOINT_BLIND = Metric(
    "quaver_joint_blind",
    "gauge",
    "1 while a joint input has no news.",
    "1",
    "joint windows",
    ("input", "route"),
)
JOINT_AGE = Metric(
    "quaver_joint_age_seconds",
    "gauge",
    "Time since a joint input last had news.",
    "s",
    "joint windows",
    ("input", "route"),
)

KV_PAGES = Metric(
    "quaver_kv_pages",
    "gauge",
    "Pages of the KV pool: used, cached (kept, and given up for room), free.",
    "page",
    "StepOutput.stats",
    ("state",),
)
PREFIX_HITS = Metric(
    "quaver_prefix_cache_hits", "counter", "Pages of prompts read from the cache.", "page", "StepOutput.stats"
)
PREFIX_MISSES = Metric(
    "quaver_prefix_cache_misses",
    "counter",
    "Pages of prompts that could have been read and were not there.",
    "page",
    "StepOutput.stats",
)
PREFIX_EVICTIONS = Metric(
    "quaver_prefix_cache_evictions", "counter", "Pages given up for room.", "page", "StepOutput.stats"
)
PREFIX_COLLISIONS = Metric(
    "quaver_prefix_cache_collisions",
    "counter",
    "Names that stood for other tokens; 0 unless somebody forges them.",
    "page",
    "StepOutput.stats",
)

KV_SERVED = Metric(
    "quaver_kv_served_tokens",
    "counter",
    "Tokens of prompts that were read instead of computed, by the tier they came from.",
    "token",
    "Finish.tier_tokens",
    ("tier",),
)
KV_SAVED = Metric(
    "quaver_kv_saved_seconds",
    "counter",
    "Computing that reading made unnecessary less what prompts waited for it; estimated from computed steps.",
    "s",
    "StepOutput.stats, StepOutput.tiers",
    ("tier",),
)
KV_LOST = Metric(
    "quaver_kv_lost_seconds",
    "counter",
    "What prompts waited for a tier beyond the computing that it made unnecessary.",
    "s",
    "StepOutput.tiers",
    ("tier",),
)
KV_WAIT = Metric(
    "quaver_kv_wait_seconds",
    "histogram",
    "What a prompt waited for the tiers below the pool, of prompts that did.",
    "s",
    "Finish.loading_s",
    (),
    TIER_EDGES_S,
)


def _tier(
    name: str,
    kind: Literal["counter", "gauge", "histogram"],
    help_: str,
    unit: str,
    buckets: tuple[float, ...] = (),
) -> Metric:
    """One figure of each tier of the KV cache."""
    return Metric(f"quaver_kv_tier_{name}", kind, help_, unit, "StepOutput.tiers", ("tier",), buckets)


TIER_BYTES = _tier("bytes", "gauge", "Bytes that a tier's pages or blocks take.", "By")
TIER_CAPACITY = _tier("capacity_bytes", "gauge", "Bytes that they may take.", "By")
TIER_TOKENS = _tier("tokens", "gauge", "Tokens whose keys and values a tier holds.", "token")
TIER_BLOCKS = _tier("blocks", "gauge", "Blocks that a tier below the pool holds.", "block")
TIER_RATIO = _tier("compression_ratio", "gauge", "Bytes of a token there ÷ in the pool.", "1")
TIER_HITS = _tier("hits", "counter", "Blocks that a prompt wanted and was handed.", "block")
TIER_MISSES = _tier("misses", "counter", "Blocks that a prompt wanted and was not handed.", "block")
TIER_STORES = _tier("stores", "counter", "Blocks that came, promotions among them.", "block")
TIER_PROMOTIONS = _tier("promotions", "counter", "Blocks that came from the tier below.", "block")
TIER_EVICTIONS = _tier("evictions", "counter", "Blocks given up for room.", "block")
TIER_LOADED = _tier("loaded_bytes", "counter", "Bytes unpacked into pages.", "By")
TIER_STORED = _tier("stored_bytes", "counter", "Bytes that came from the tier above.", "By")
TIER_PROMOTED = _tier("promoted_bytes", "counter", "Bytes that came from the tier below.", "By")
TIER_LOAD_TIME = _tier(
    "load_seconds", "histogram", "From asking for a block to its being in its pages.", "s", TIER_EDGES_S
)
TIER_STORE_TIME = _tier(
    "store_seconds", "histogram", "From making room for a block to its being there.", "s", TIER_EDGES_S
)
TIER_DROPPED = _tier("dropped_tokens", "counter", "Tokens left out when blocks were packed.", "token")
TIER_KEPT = _tier("kept_tokens", "counter", "Tokens that were packed.", "token")
TIER_CORRUPT = _tier("corrupt", "counter", "Blocks whose bytes were not what was stored.", "block")
TIER_LATE = _tier("late", "counter", "Loads that were not there at their deadline.", "block")
TIER_ERRORS = _tier("errors", "counter", "Reads, writes and hand-overs that failed.", "error")
TIER_COLLISIONS = _tier("collisions", "counter", "Names that stood for other tokens.", "block")
TIER_FOREIGN = _tier(
    "foreign", "counter", "Blocks of another model or version, or asked for under another tenant.", "block"
)
TIER_REFUSED = _tier(
    "refused", "counter", "Loads and stores that found a full queue, no room or a pause.", "block"
)
TIER_SKIPPED = _tier(
    "skipped",
    "counter",
    "Blocks that left the tier above without a copy, as none was expected to pay.",
    "block",
)
QUEUE_DEPTH = Metric(
    "quaver_queue_depth", "gauge", "Choices waiting for a place.", "choice", "StepOutput.stats"
)
RUNNING = Metric("quaver_running", "gauge", "Choices being decoded.", "choice", "StepOutput.stats")
ADMISSION_POOL = Metric(
    "quaver_admission_pool", "gauge", "Admission tokens, one a choice in flight.", "choice", "Door.levels"
)
ADMISSION_IN_FLIGHT = Metric(
    "quaver_admission_in_flight", "gauge", "Choices let in that are not over.", "choice", "Door.levels"
)
PREDICTED_QPS = Metric(
    "quaver_predicted_qps", "gauge", "Arrivals a second, as predicted.", "choice/s", "Door.levels"
)
QUEUE_DELAY = Metric(
    "quaver_queue_delay_seconds",
    "gauge",
    "Predicted wait of a newcomer, of the tenant that would wait longest.",
    "s",
    "Door.levels",
)
OPEN_REQUESTS = Metric("quaver_open_requests", "gauge", "Requests started and not ended.", "request", "hub")
STEP_DURATION = Metric(
    "quaver_step_duration_seconds",
    "histogram",
    "Time of one engine step.",
    "s",
    "StepOutput.duration_s",
    (),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
DETAIL_SECONDS = Metric(
    "quaver_detail_seconds",
    "counter",
    "Step time spent on layer detail; as a share of quaver_step_duration_seconds, what the budget is about.",
    "s",
    "StepOutput.detail_s",
)
DETAIL_TOKENS = Metric(
    "quaver_detail_tokens",
    "counter",
    "Tokens with layer detail, by why they were sampled: risk, floor, full.",
    "token",
    "StepOutput.detail_reasons",
    ("reason",),
)
ENGINE_UP = Metric("quaver_engine_up", "gauge", "1 while the model process answers.", "1", "on_engine")
ENGINE_RESTARTS = Metric(
    "quaver_engine_restarts", "counter", "Times the model process was lost.", "event", "on_engine"
)
ENGINE_INFO = Metric(
    "quaver_engine_info",
    "gauge",
    "What runs.",
    "1",
    "Ready",
    ("model_name", "quantization", "dtype", "backend"),
)

#: Every metric of this package; other packages' metrics on the same registry bring their own names.
METRICS: Final[tuple[Metric, ...]] = tuple(
    value for value in dict(globals()).values() if isinstance(value, Metric)
)
BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in METRICS}

#: Prometheus labels that have another name as OTLP attributes.
OTEL_LABELS: Final = {
    "gen_ai_operation_name": "gen_ai.operation.name",
    "gen_ai_provider_name": "gen_ai.provider.name",
    "gen_ai_request_model": "gen_ai.request.model",
    "error_type": "error.type",
}

#: Where keys and values are kept, the nearest first: label values of `tier`.
TIERS: Final = ("device", "host", "disk")

OTHER: Final = "other"  # label value of everything beyond a cap
ALL: Final = "all"  # route label of the whole server, joint gauges only

# Spans.
SPAN_ENCODE: Final = "llm.prompt.encode"
SPAN_GENERATE: Final = "llm.completion.generate"
SPAN_KV_LOAD: Final = "quaver.kv_cache.load"  # a prompt's wait for the tiers below the pool
PROVIDER: Final = "quaver"
OPERATIONS: Final = {"chat": "chat", "completions": "text_completion"}  # by endpoint

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
INPUT_MESSAGES: Final = "gen_ai.input.messages"  # content capture only
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"  # content capture only
ERROR_TYPE: Final = "error.type"

LLM_REQUEST_TYPE: Final = "llm.request.type"
LLM_PROMPT_TOKENS: Final = "llm.prompt.tokens"
LLM_COMPLETION_TOKENS: Final = "llm.completion.tokens"
LLM_KV_HIT_RATIO: Final = "llm.kv_cache.hit_ratio"
LLM_KV_SIZE: Final = "llm.kv_cache.size"  # tokens the choice holds at its end
LLM_TOKEN_LATENCY: Final = "llm.token.latency"  # noqa: S105 - seconds, mean gap between tokens
LLM_DECODE_STEP_LENGTH: Final = "llm.decode.step.length"  # engine steps from the first token to the last
LLM_PROMPT_LENGTH: Final = "llm.prompt.length"
LLM_MODEL_ID: Final = "llm.model.id"
LLM_STEP_INDEX: Final = "llm.step.index"  # engine step of the last token

QUAVER_REQUEST_ID: Final = "quaver.request.id"
QUAVER_ROUTE: Final = "quaver.route"
QUAVER_TENANT: Final = "quaver.tenant"
QUAVER_CANARY: Final = "quaver.canary"
QUAVER_CHOICE: Final = "quaver.choice"
QUAVER_QUEUED: Final = "quaver.queued_s"
QUAVER_KV_TOKENS: Final = "quaver.kv_cache.tokens."  # + tier: tokens of the prompt that came from it
QUAVER_FAULTS: Final = "quaver.faults"
QUAVER_OUTCOME: Final = "quaver.outcome"
QUAVER_UPSTREAM_STEP: Final = "quaver.upstream.step"
QUAVER_AGGREGATE: Final = "quaver.aggregate."  # + name
QUAVER_ANNOTATION: Final = "quaver.annotation."  # + name

EVENT_FIRST_TOKEN: Final = "quaver.first_token"  # noqa: S105
EVENT_ALERT: Final = "quaver.alert"

HEADER_STEP: Final = "x-quaver-step"  # engine step id, carried to whatever is called downstream
