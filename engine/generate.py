"""Text from an engine in this process, for notebooks and tests."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.core import Engine
from engine.messages import RequestMeta, SamplingParams, Submit
from engine.text import TextStream
from engine.tokenizer import Tokenizer


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    params: SamplingParams | None = None,
    stop: Sequence[str] = (),
) -> str:
    """Return the answer to a text or to chat messages; raises RequestError when it cannot run.

    The engine must have nothing else to do: steps are taken here until the answer is over.
    """
    rendered = prompt if isinstance(prompt, str) else tokenizer.chat(prompt)
    request_id = f"local-{uuid.uuid4().hex}"
    engine.submit(
        Submit(
            meta=RequestMeta(request_id=request_id),
            token_ids=tokenizer.encode_prompt(rendered),
            params=params or SamplingParams(),
        )
    )
    stream = TextStream(tokenizer, stop)
    text = ""
    while engine.has_work:
        output = engine.step()
        text += stream.push(np.frombuffer(output.token_ids, "<i4").tolist())
        if stream.stopped:
            engine.abort(request_id)
    return text + stream.finish()
