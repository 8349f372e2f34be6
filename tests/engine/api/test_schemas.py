"""What a refused body is told: the field, what it may be, what was sent; never the decoder's own words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engine.api.errors import ApiError
from engine.api.schemas import ChatRequest, CompletionRequest, parse

USER = [{"role": "user", "content": "Hello"}]


def refused(body: bytes, kind: type[Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body, kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "'messages' is missing"),
        ({"messages": "Hello"}, "messages", 'messages has to be a list, not "Hello"'),
        ({"messages": ["Hello"]}, "messages[0]", 'messages[0] has to be an object, not "Hello"'),
        ({"messages": [*USER, {"content": "x"}]}, "messages[1].role", "messages[1]: 'role' is missing"),
        ({"messages": [{"role": 1}]}, "messages[0].role", "messages[0].role has to be a text, not 1"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "messages[0].content has to be a text or a list, not 5",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text",
            "messages[0].content[0].text has to be a text, not 5",
        ),
        ({"max_tokens": "8"}, "max_tokens", 'max_tokens has to be a whole number, not "8"'),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens has to be a whole number, not 1.5"),
        ({"temperature": True}, "temperature", "temperature has to be a number, not true"),
        ({"stream": "yes"}, "stream", 'stream has to be true or false, not "yes"'),
        ({"stop": [3]}, "stop[0]", "stop[0] has to be a text, not 3"),
        ({"logit_bias": {"1": "a"}}, "logit_bias[...]", "each of logit_bias has to be a number"),
        ({"stream_options": True}, "stream_options", "stream_options has to be an object, not true"),
        (
            {"stream_options": {"include_usage": 3}},
            "stream_options.include_usage",
            "stream_options.include_usage has to be true or false, not 3",
        ),
        ({"top_k": -1}, "top_k", "top_k must be from 0 to 2147483647; got -1"),
    ],
)
def test_a_chat_body_is_refused_in_plain_words(body: dict[str, Any], param: str, words: str) -> None:
    whole = {"messages": USER} | body if body else body
    error = refused(json.dumps(whole).encode(), ChatRequest)
    assert (error.param, error.message) == (param, words)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": 3}, "prompt has to be a text or a list, not 3"),
        ({"prompt": [[1, "a"]]}, 'prompt[0][1] has to be a whole number, not "a"'),
        ({"prompt": [1.5]}, "prompt[0] has to be a text or a whole number or a list, not 1.5"),
    ],
)
def test_a_completion_body_is_refused_in_plain_words(body: dict[str, Any], words: str) -> None:
    assert refused(json.dumps(body).encode(), CompletionRequest).message == words


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_no_field_is_refused_in_the_decoder_words(kind: type[Any]) -> None:
    sound = {"messages": USER, "prompt": "x"}
    for field in msgspec.structs.fields(kind):
        # One of these is wrong for any field; null is "not given" for all that are optional.
        errors = []
        for value in (3.5, {"a": {}}):
            body = {n: v for n, v in sound.items() if n in kind.__struct_fields__} | {field.name: value}
            try:
                parse(json.dumps(body).encode(), kind)
            except ApiError as error:
                errors.append(error)
        assert errors, field.name
        for error in errors:
            assert error.param is not None and error.param.startswith(field.name)
            assert not any(word in error.message for word in ("Expected", "`", "$", "something else"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "Input data was truncated"),
        (b'{"messages": [}', "invalid character (byte 14)"),
        (b'{"temperature": 1e999}', "Number out of range"),
        (b"[" * 50_000, "it is nested too deeply"),
    ],
)
def test_what_is_no_json_is_told_why(body: bytes, words: str) -> None:
    error = refused(body, ChatRequest)
    assert (error.code, error.message) == ("invalid_json", f"the body is not valid JSON: {words}")
