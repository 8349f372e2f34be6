"""Request bodies: typed, checked, and refused by name where an answer would silently be wrong."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from engine.api.body import decode
from engine.api.errors import ApiError
from engine.words import ShapeError, convert

MAX_STOP = 4
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20

#: Accepted and ignored: they change nothing about the answer.
_HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
    }
)
#: Known to OpenAI's API but not here; None or the neutral value is accepted.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
}


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding for somebody else's network; nothing to do


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints share. None is "not given"."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    signals: bool | None = None


class Part(msgspec.Struct, frozen=True):
    """One part of a message; only text is understood."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One chat message."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class ChatRequest(Sampling, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


T = TypeVar("T", ChatRequest, CompletionRequest)


def parse(body: bytes, kind: type[T]) -> T:
    """Return the typed body; raises ApiError 400 that names the field."""
    try:
        raw = decode(body)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ApiError(400, "invalid_json", "the body must be a JSON object")
    _refuse_unsupported(raw, kind)
    try:
        request = convert(raw, kind)
    except ShapeError as error:
        code = "missing_required_parameter" if error.missing else "invalid_type"
        raise ApiError(400, code, str(error), param=error.path or None) from None
    _check_ranges(request)
    return request


def messages_of(request: ChatRequest) -> list[dict[str, Any]]:
    """Return messages with plain string content and roles that templates know."""
    if not request.messages:
        raise _value("messages", "needs at least one message")
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(request.messages):
        where = f"messages[{i}]"
        if message.tool_calls or message.tool_call_id or message.role in ("tool", "function"):
            raise ApiError(400, "unsupported_parameter", "tools are not supported here", param=where)
        if message.role not in ("system", "developer", "user", "assistant"):
            raise _value(f"{where}.role", "must be system, developer, user or assistant")
        role = "system" if message.role == "developer" else message.role
        messages.append({"role": role, "content": _text(message, where)})
    return messages


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts, each a text or a list of token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise _value("prompt", "must not be empty")
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if len(prompts) != len(prompt) or len({type(item) for item in prompts}) > 1:
        raise _value("prompt", "must be text, token ids, a list of texts, or a list of lists of token ids")
    return prompts


def stops_of(request: Sampling) -> list[str]:
    """Return the stop strings."""
    stops = [request.stop] if isinstance(request.stop, str) else list(request.stop or [])
    if len(stops) > MAX_STOP:
        raise _value("stop", f"takes at most {MAX_STOP} strings")
    if any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise _value("stop", f"each string needs 1 to {MAX_STOP_LENGTH} characters")
    return stops


def biases_of(request: Sampling, vocab: int) -> dict[int, float]:
    """Return the logit biases by token id."""
    biases = {}
    for key, value in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab):
            raise _value("logit_bias", f"keys are token ids from 0 to {vocab - 1}; got {key[:32]!r}")
        if not -100 <= value <= 100:
            raise _value("logit_bias", "values are from -100 to 100")
        biases[int(key)] = value
    return biases


def _refuse_unsupported(raw: dict[str, Any], kind: type[ChatRequest | CompletionRequest]) -> None:
    known = {field.name for field in msgspec.structs.fields(kind)}
    for name, value in raw.items():
        if name in known or name in _HARMLESS:
            continue
        neutral = _UNSUPPORTED.get(name)
        if neutral is None:
            raise ApiError(
                400, "unknown_parameter", f"{name!r} is not a parameter of this endpoint", param=name
            )
        if value is not None and value not in neutral:
            raise ApiError(400, "unsupported_parameter", f"{name!r} is not supported here", param=name)


def _check_ranges(request: ChatRequest | CompletionRequest) -> None:
    limits: list[tuple[str, float, float]] = [
        ("n", 1, 128),
        ("max_tokens", 1, 2**31 - 1),
        ("max_completion_tokens", 1, 2**31 - 1),
        ("temperature", 0, 2),
        ("top_k", 0, 2**31 - 1),
        ("seed", -(2**63), 2**63 - 1),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("repetition_penalty", 0.01, 100),
        ("top_logprobs", 0, MAX_TOP_LOGPROBS),
    ]
    for name, low, high in limits:
        value = getattr(request, name, None)
        if value is not None and not low <= value <= high:
            raise _value(name, f"must be from {low} to {high}; got {str(value)[:20]}")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise _value("top_p", f"must be above 0 and at most 1; got {request.top_p:g}")
    if request.stream_options is not None and not request.stream:
        raise _value("stream_options", "needs stream: true")
    if isinstance(request, ChatRequest):
        both = request.max_tokens is not None and request.max_completion_tokens is not None
        if both and request.max_tokens != request.max_completion_tokens:
            raise _value("max_tokens", "differs from max_completion_tokens; send one of them")
        if request.top_logprobs is not None and not request.logprobs:
            raise _value("top_logprobs", "needs logprobs: true")
        return
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_TOP_LOGPROBS:
        raise _value("logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}; got {request.logprobs}")
    if request.echo and request.logprobs is not None:
        raise ApiError(
            400,
            "unsupported_parameter",
            "echo with logprobs is not supported: log-probabilities of the prompt are not computed",
            param="echo",
        )


def _text(message: Message, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        raise _value(f"{where}.content", "must be a string or a list of text parts")
    pieces = []
    for i, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise ApiError(
                400,
                "unsupported_parameter",
                f"content of type {part.type[:32]!r} is not supported; send text",
                param=f"{where}.content[{i}]",
            )
        pieces.append(part.text)
    return "".join(pieces)


def _value(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_value", f"{param} {message}", param=param)
