"""From a request body to what the engine is asked to do; everything that can be refused, is refused here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from engine.api import schemas
from engine.api.errors import ApiError
from engine.hooks import Encoding
from engine.messages import RequestMeta, SamplingParams, Submit
from engine.tokenizer import GUARD, ChatTemplateError

if TYPE_CHECKING:
    from engine.api.state import ApiState

#: OpenAI's default for text completions.
_COMPLETION_TOKENS = 16
#: Faults, template and tokeniser take longer texts on a thread, so that streams and heartbeats go on.
_THREAD_CHARS = 4000
_TEMPLATE_CHARS = 20  # that a chat template adds to a message, about
_GREEDY_BELOW = 1e-4  # logits divided by less than this overflow

log = logging.getLogger("quaver.api")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One admitted request. Choice i answers `submits[i]`; its text begins with `prefixes[i]` (echo)."""

    meta: RequestMeta
    arrived: float  # time.perf_counter
    endpoint: Literal["chat", "completions"]
    model: str
    stream: bool
    include_usage: bool
    submits: list[Submit]
    prefixes: list[str]
    stop: list[str]
    logprobs: bool
    signals: bool
    prompt_tokens: int
    choices_each: int  # of every prompt
    max_tokens: int
    temperature: float
    faults: list[str]
    prompt: str | None


async def chat_job(state: ApiState, body: bytes, meta: RequestMeta) -> Job:
    """Read a chat request. Prompt faults act on the messages, before the template."""
    arrived = time.perf_counter()
    request = schemas.parse(body, schemas.ChatRequest)
    messages, faults = await _apply(state, meta, schemas.messages_of(request))
    encoding, more = _encoding(state, meta, chat=True)
    size = sum(len(message["content"]) + _TEMPLATE_CHARS for message in messages)
    try:
        rendered = await _compute(size, lambda: state.tokenizer.chat(messages, template=encoding.template))
    except ChatTemplateError as error:
        raise ApiError(400, "invalid_value", str(error), param="messages") from None
    ids = await _compute(size, lambda: state.tokenizer.encode_prompt(rendered))
    ids = _begun(state, encoding) + ids
    wanted = request.max_completion_tokens or request.max_tokens
    default = state.settings.default_max_tokens
    return _job(
        state,
        request,
        meta,
        arrived=arrived,
        endpoint="chat",
        prompts=[ids],
        echoes=[""],
        wanted=wanted,
        default=default,
        top_logprobs=request.top_logprobs or 0,
        logprobs=bool(request.logprobs),
        faults=faults + more,
        prompt=rendered.replace(GUARD, ""),
    )


async def completion_job(state: ApiState, body: bytes, meta: RequestMeta) -> Job:
    """Read a text completion request. Prompt faults act on texts; token ids are taken as they are."""
    arrived = time.perf_counter()
    request = schemas.parse(body, schemas.CompletionRequest)
    given = schemas.prompts_of(request)
    _check_choices(state, request, len(given))
    prompts: list[list[int]] = []
    echoes: list[str] = []
    encoding, faults = _encoding(state, meta, chat=False)
    shown: str | None = None
    for prompt in given:
        if isinstance(prompt, str):
            messages, found = await _apply(state, meta, [{"role": "prompt", "content": prompt}])
            text = "".join(message["content"] for message in messages)
            ids = await _compute(len(text), partial(state.tokenizer.encode_prompt, text))
            ids = _begun(state, encoding) + ids
            faults += [fault for fault in found if fault not in faults]
            echo = prompt
        else:
            ids = prompt
            text = echo = await _compute(len(ids), partial(state.tokenizer.decode, ids))
        shown = text if shown is None else shown
        prompts.append(ids)
        echoes.append(echo if request.echo else "")
    return _job(
        state,
        request,
        meta,
        arrived=arrived,
        endpoint="completions",
        prompts=prompts,
        echoes=echoes,
        wanted=request.max_tokens,
        default=_COMPLETION_TOKENS,
        top_logprobs=request.logprobs or 0,
        logprobs=request.logprobs is not None,
        faults=faults,
        prompt=shown,
    )


async def _apply(
    state: ApiState, meta: RequestMeta, messages: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Let prompt faults act; a hook that fails leaves the prompt as it was."""
    hook = state.prompt_hook
    if hook is None:
        return messages, []
    size = sum(len(message["content"]) for message in messages)
    try:
        return await _compute(size, lambda: hook.apply(meta, messages))
    except Exception:
        log.exception("the prompt hook failed; the prompt is used as it came")
        return messages, []


def _encoding(state: ApiState, meta: RequestMeta, *, chat: bool) -> tuple[Encoding, list[str]]:
    """Ask how a prompt is encoded; a hook that fails has no say."""
    hook = state.prompt_hook
    if hook is None:
        return Encoding(), []
    try:
        return hook.encoding(meta, chat=chat, bos=state.tokenizer.bos_id is not None)
    except Exception:
        log.exception("the prompt hook failed; the prompt is encoded as usual")
        return Encoding(), []


def _begun(state: ApiState, encoding: Encoding) -> list[int]:
    bos = state.tokenizer.bos_id
    return [] if bos is None else [bos] * encoding.bos


async def _compute(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > _THREAD_CHARS else work()


def _job(
    state: ApiState,
    request: schemas.Sampling,
    meta: RequestMeta,
    *,
    arrived: float,
    endpoint: Literal["chat", "completions"],
    prompts: list[list[int]],
    echoes: list[str],
    wanted: int | None,
    default: int,
    top_logprobs: int,
    logprobs: bool,
    faults: list[str],
    prompt: str | None,
) -> Job:
    ready = state.require_ready()
    if not state.serves(request.model):
        raise ApiError(
            404, "model_not_found", f"this server runs {state.model!r}, not {request.model!r}", param="model"
        )
    if request.signals and state.record_encoder is None:
        raise ApiError(400, "unsupported_parameter", "this server keeps no token records", param="signals")
    _check_choices(state, request, len(prompts))
    context = min(ready.max_context, ready.kv_pages * ready.page_size)
    field = "messages" if endpoint == "chat" else "prompt"
    limits = {"context": context, "vocab": ready.vocab}
    lengths = [_answer_length(ids, wanted, default, **limits, field=field) for ids in prompts]
    biases = schemas.biases_of(request, ready.vocab)
    temperature = 1.0 if request.temperature is None else request.temperature
    salt = state.salts.of(meta.tenant) if state.salts is not None else b""
    submits: list[Submit] = []
    for ids, length in zip(prompts, lengths, strict=True):
        params = SamplingParams(
            max_tokens=length,
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_k=request.top_k or 0,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=request.seed,
            repetition_penalty=request.repetition_penalty or 1.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=biases,
            ignore_eos=bool(request.ignore_eos),
            top_logprobs=top_logprobs,
            full_signals=bool(request.signals),
        )
        submits += [
            Submit(meta=meta, choice=len(submits) + i, token_ids=ids, params=params, cache_salt=salt)
            for i in range(request.n or 1)
        ]
    return Job(
        meta=meta,
        arrived=arrived,
        endpoint=endpoint,
        model=state.model,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        submits=submits,
        prefixes=[echo for echo in echoes for _ in range(request.n or 1)],
        stop=schemas.stops_of(request),
        logprobs=logprobs,
        signals=bool(request.signals),
        prompt_tokens=sum(map(len, prompts)),
        choices_each=request.n or 1,
        max_tokens=max(lengths),
        temperature=temperature,
        faults=faults,
        prompt=prompt,
    )


def _check_choices(state: ApiState, request: schemas.Sampling, prompts: int) -> None:
    choices = (request.n or 1) * prompts
    if choices > state.settings.max_choices:
        raise ApiError(
            400,
            "invalid_value",
            f"{choices} choices (n times prompts) are asked for; at most {state.settings.max_choices} "
            "are possible in one request",
            param="n",
        )


def _answer_length(
    ids: list[int], wanted: int | None, default: int, *, context: int, vocab: int, field: str
) -> int:
    """Return how many tokens may be generated after a prompt; raises ApiError when it does not fit."""
    if not ids:
        raise ApiError(400, "invalid_value", "the prompt is empty: it needs at least one token", param=field)
    if min(ids) < 0 or max(ids) >= vocab:
        raise ApiError(400, "invalid_value", f"token ids must be from 0 to {vocab - 1}", param=field)
    room = context - len(ids)
    if room < (wanted or 1):
        asked = f" and max_tokens is {wanted}" if wanted else ""
        raise ApiError(
            400,
            "context_length_exceeded",
            f"the prompt has {len(ids)} tokens{asked}; this server's context is {context} tokens. "
            "Shorten the prompt or the answer",
            param=field,
        )
    return wanted or min(default, room)
