"""The shapes of answers: chat and text completions, whole and streamed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from engine.api.generation import Choice, Delta, Generation
from engine.process.channel import Token

if TYPE_CHECKING:
    from engine.api.state import ApiState


class Reply:
    """Builds JSON-ready dicts for one generation; subclasses know the shape of a choice."""

    kind = ""
    chunk_kind = ""

    def __init__(self, state: ApiState, generation: Generation) -> None:
        self.generation = generation
        self.job = generation.job
        self._state = state
        self._created = int(time.time())
        self._signals_sent = [0] * len(generation.choices)

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks before any token."""
        raise NotImplementedError

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return the chunk for one delta."""
        choice = self._piece(delta)
        if self.job.signals:
            choice["signals"] = self._signals(delta.choice)
        return self._chunk([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream that asked for usage."""
        return self._chunk([]) | {"usage": self._usage()}

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """Return the body of a finished answer."""
        choices = []
        for choice in self.generation.choices:
            own = [delta for delta in deltas if delta.choice == choice.index]
            tokens = [token for delta in own for token in delta.tokens]
            offsets = [offset for delta in own for offset in delta.offsets]
            shaped = self._whole_choice(choice, tokens, offsets)
            if self.job.signals:
                shaped["signals"] = self._signals(choice.index)
            choices.append(shaped)
        return self._head(self.kind) | {"choices": choices, "usage": self._usage()}

    def _piece(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_choice(self, choice: Choice, tokens: list[Token], offsets: list[int]) -> dict[str, Any]:
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.job.meta.request_id,
            "object": kind,
            "created": self._created,
            "model": self.job.model,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head(self.chunk_kind) | {"choices": choices}
        return chunk | {"usage": None} if self.job.include_usage else chunk

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self.job.prompt_tokens, self.generation.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.generation.cached_tokens or 0},
        }

    def _signals(self, index: int) -> list[dict[str, Any]]:
        """Return the token records not sent so far; none from behind a stop string."""
        encoder = self._state.record_encoder
        start, stop = self._signals_sent[index], self.generation.choices[index].tokens
        if encoder is None:
            return []
        records = encoder.records(self.job.meta.request_id, index, start)[: stop - start]
        self._signals_sent[index] += len(records)
        return records

    def _name(self, token_id: int) -> tuple[str, bytes]:
        data = self._state.tokenizer.token_bytes(token_id)
        return data.decode(errors="replace"), data


class ChatReply(Reply):
    """Shapes of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """Return one chunk a choice, which says the role only."""
        return [
            self._chunk([self._shape(choice.index, {"role": "assistant", "content": ""}, None, None)])
            for choice in self.generation.choices
        ]

    def _piece(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        logprobs = self._logprobs(delta.tokens) if self.job.logprobs and delta.tokens else None
        return self._shape(delta.choice, content, logprobs, delta.finish)

    def _shape(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _whole_choice(self, choice: Choice, tokens: list[Token], _offsets: list[int]) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self._logprobs(tokens) if self.job.logprobs else None,
            "finish_reason": choice.finish,
        }

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        content = [
            self._entry(token.token_id, token.logprob)
            | {"top_logprobs": [self._entry(i, logprob) for i, logprob in token.alternatives]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._name(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(data)}


class CompletionReply(Reply):
    """Shapes of /v1/completions."""

    kind = chunk_kind = "text_completion"

    def opening(self) -> list[dict[str, Any]]:
        """Return the echoed prompts, where asked for."""
        return [
            self._chunk([self._shape(i, prefix, None, None)])
            for i, prefix in enumerate(self.job.prefixes)
            if prefix
        ]

    def _piece(self, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs(delta.tokens, delta.offsets) if self.job.logprobs and delta.tokens else None
        return self._shape(delta.choice, delta.text, logprobs, delta.finish)

    def _whole_choice(self, choice: Choice, tokens: list[Token], offsets: list[int]) -> dict[str, Any]:
        text = self.job.prefixes[choice.index] + "".join(choice.text)
        logprobs = self._logprobs(tokens, offsets) if self.job.logprobs else None
        return self._shape(choice.index, text, logprobs, choice.finish)

    def _shape(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: list[Token], offsets: list[int]) -> dict[str, Any]:
        return {
            "tokens": [self._label(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._best(token) for token in tokens],
            "text_offset": offsets,
        }

    def _best(self, token: Token) -> dict[str, float]:
        """The asked-for alternatives, and the token itself where it is not one of them."""
        if not token.alternatives:
            return {}
        return {
            self._label(i): logprob for i, logprob in [*token.alternatives, (token.token_id, token.logprob)]
        }

    def _label(self, token_id: int) -> str:
        """A token's text, or its bytes where they are no text: keys must not collide."""
        text, data = self._name(token_id)
        return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
