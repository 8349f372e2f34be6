"""Every refusal: OpenAI's shape, the right status, decided before a 200."""

from __future__ import annotations

import httpx
import openai
import pytest

from engine.hooks import Rejection

pytestmark = pytest.mark.model

USER = [{"role": "user", "content": "Hello"}]


def error_of(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "unsupported_parameter",
        ),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"n": 17}, "n", "invalid_value"),
        ({"stop": list("abcde")}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
    ],
)
def test_a_wrong_chat_body_names_its_field(http, change, param, code):
    error = error_of(http.post("/v1/chat/completions", json={"messages": USER} | change), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": ["a"] * 9, "n": 2}, "n"),
    ],
)
def test_a_wrong_completion_body_names_its_field(http, change, param):
    assert error_of(http.post("/v1/completions", json=change), 400)["param"] == param


@pytest.mark.parametrize(
    "change",
    [
        b'"n": 1' + b"0" * 400,
        b'"top_k": 1' + b"0" * 400,
        b'"max_tokens": 1' + b"0" * 4000,
        b'"temperature": 1e400',
        b'"logit_bias": {"' + b"1" * 5000 + b'": 1}',
    ],
)
def test_numbers_beyond_all_bounds_are_refused(http, change):
    body = b'{"messages": [{"role": "user", "content": "x"}], ' + change + b"}"
    error_of(http.post("/v1/chat/completions", content=body), 400)


NESTED = b"[" * 50_000 + b"]" * 50_000


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"messages": NaN}', NESTED])
def test_what_is_no_json_object_is_refused(http, body):
    assert error_of(http.post("/v1/chat/completions", content=body), 400)["code"] == "invalid_json"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_told_the_numbers(http, stream):
    body = {"prompt": [5] * 8190, "max_tokens": 3, "stream": stream}
    error = error_of(http.post("/v1/completions", json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("8190", "3", "8192"))


def test_openai_client_raises_its_own_errors(ai, server):
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(model="smollm2-135m", messages=USER, temperature=9)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.NotFoundError):
        ai.chat.completions.create(model="gpt-4o", messages=USER)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="nobody", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert ai.models.list().data[0].id == ai.models.retrieve(ai.models.list().data[0].id).id


def test_roles_are_kept_apart(server):
    def ask(method: str, path: str, role: str | None) -> httpx.Response:
        headers = {"authorization": f"Bearer {server.key(role)}"} if role else {}
        return httpx.request(method, server.url + path, headers=headers)

    assert ask("GET", "/health", None).status_code == 200
    assert ask("GET", "/ready", None).json()["ready"] is True
    assert error_of(ask("GET", "/v1/models", None), 401)["code"] == "missing_api_key"
    assert error_of(ask("GET", "/v1/models", "viewer"), 403)["code"] == "role_not_allowed"
    assert error_of(ask("GET", "/quaver/status", "client"), 403)["type"] == "permission_error"
    assert ask("GET", "/v1/models", "operator").status_code == 200
    assert error_of(ask("GET", "/quaver/nothing", "viewer"), 404)["code"] == "not_found"
    assert error_of(ask("GET", "/v1/completions", "client"), 405)["code"] == "method_not_allowed"


def test_a_large_body_is_not_read(http):
    body = b'{"prompt": "' + b"a" * (2 << 20) + b'"}'
    assert error_of(http.post("/v1/completions", content=body), 413)["code"] == "body_too_large"
    chunks = (b"a" * 65536 for _ in range(40))
    assert error_of(http.post("/v1/completions", content=chunks), 413)["code"] == "body_too_large"


class Closed:
    """A gate that admits nobody."""

    def admit(self, meta):
        return Rejection(status=503, code="breaker_open", message="try later", retry_after_s=2.2)


def test_the_gate_has_the_last_word(http, server):
    server.state.gate = Closed()
    try:
        answer = http.post("/v1/chat/completions", json={"messages": USER, "stream": True})
    finally:
        server.state.gate = None
    error = error_of(answer, 503)
    assert (error["code"], error["message"], answer.headers["retry-after"]) == (
        "breaker_open",
        "try later",
        "3",
    )
    meta, status, code = server.recorder.rejected[-1]
    assert (meta.request_id, status, code) == (answer.headers["x-request-id"], 503, "breaker_open")
    assert meta.request_id not in server.recorder.started


def test_a_full_queue_and_a_greedy_tenant_are_429(http, server):
    """One request of 16 choices fills the 4 + 12 places."""
    body = {"prompt": "a", "n": 16, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body):
        assert server.client.open_choices == 16
        full = http.post("/v1/completions", json={"prompt": "a"})
    assert error_of(full, 429)["code"] == "queue_full"
    assert int(full.headers["retry-after"]) >= 1
    assert server.idle()

    server.state._tenants["default"] = 64
    try:
        greedy = http.post("/v1/completions", json={"prompt": "a"})
    finally:
        del server.state._tenants["default"]
    assert error_of(greedy, 429)["code"] == "tenant_concurrency"
