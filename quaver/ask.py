"""The server asks itself: requests that take the same way as a client's, without the socket."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import msgspec

from engine.api.generation import Delta, Generation
from engine.api.jobs import chat_job
from engine.api.replies import ChatReply
from engine.api.state import ApiState
from engine.messages import RequestMeta


async def ask(
    state: ApiState, body: dict[str, Any], meta: RequestMeta, *, cached: bool = True
) -> tuple[Generation, list[Delta]]:
    """Send a chat request and return its answer when that is whole.

    It passes the door and the gate, is queued and struck by faults as the traffic that `meta` makes it one
    of, but counts against nobody's limit. `cached`: the tenant's prefix cache is read and written, else
    neither. Raises ApiError when it is refused or fails, DisconnectedError when the server ends it.
    """
    job = await chat_job(state, msgspec.json.encode(body), meta)
    if not cached:
        submits = [msgspec.structs.replace(submit, cache_salt=b"") for submit in job.submits]
        job = dataclasses.replace(job, submits=submits)
    state.admit(meta, len(job.submits))
    deltas: list[Delta] = []
    with Generation(state, job) as generation:
        while not generation.over:
            deltas += await generation.next()
    return generation, deltas


async def ask_as_canary(state: ApiState, body: dict[str, Any]) -> dict[str, Any]:
    """Ask as the default tenant, marked as a canary; return the API's JSON answer. Raises as `ask` does."""
    meta = RequestMeta(request_id=f"canary-{uuid.uuid4().hex}", canary=True)
    generation, deltas = await ask(state, body, meta)
    return ChatReply(state, generation).whole(deltas)
