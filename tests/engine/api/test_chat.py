"""Chat completions as OpenAI's own client sees them, on the real model."""

from __future__ import annotations

import json
import math

import pytest

pytestmark = pytest.mark.model

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
COUNT = [{"role": "user", "content": "Count from one to ten in words."}]


def chat(ai, messages=PARIS, **options):
    options = {"model": "smollm2-135m", "temperature": 0, "max_tokens": 24} | options
    return ai.chat.completions.create(messages=messages, **options)


def text_of(chunks) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_the_capital_of_france(ai, server):
    answer = chat(ai)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    ended = server.recorder.end_of(answer.id)
    assert (ended.reason, ended.disconnected, ended.error) == ("stop", False, None)
    assert ended.output == answer.choices[0].message.content
    assert ended.completion_tokens == answer.usage.completion_tokens
    assert len(ended.token_times_s) == answer.usage.completion_tokens - 2  # gaps; the last shows nothing
    assert 0 < ended.first_token_s < ended.duration_s
    assert ended.aggregates["tokens"] == answer.usage.completion_tokens
    texts = server.recorder.texts[answer.id]
    assert "".join(event.text for event in texts) == ended.output
    started = server.recorder.started[answer.id]
    assert started.endpoint == "chat"
    assert started.prompt.count("What is the capital of France?") == 1


def test_a_stream_is_the_same_text_with_the_role_first(ai, server):
    whole = chat(ai)
    chunks = list(chat(ai, stream=True))
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[0].choices[0].delta.content
    assert all(chunk.usage is None for chunk in chunks)
    assert [c.choices[0].finish_reason for c in chunks][-2:] == [None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert server.recorder.end_of(chunks[0].id).first_token_s > 0


def test_usage_comes_last_and_only_when_asked(ai):
    chunks = list(chat(ai, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_says_what_was_cached(ai, server):
    """This server is deterministic: hits end at multiples of a step of 512 tokens."""
    long = [{"role": "system", "content": "Answer in one word. " * 120}, *PARIS]
    cold = chat(ai, long, max_tokens=2)
    assert cold.usage.prompt_tokens > 512
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    warm = chat(ai, long, max_tokens=2, n=2)
    assert warm.usage.prompt_tokens_details.cached_tokens == 512
    assert warm.choices[0].message.content == cold.choices[0].message.content
    ended = server.recorder.end_of(warm.id)
    assert (ended.prompt_tokens, ended.cached_tokens) == (cold.usage.prompt_tokens, 512)
    assert (ended.tier_tokens, ended.loading_s) == ({"device": 512}, 0.0)
    chunks = list(chat(ai, long, max_tokens=2, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 512


def test_the_wire_ends_with_done(http):
    body = {"messages": PARIS, "max_tokens": 3, "temperature": 0, "stream": True}
    answer = http.post("/v1/chat/completions", json=body)
    events = answer.text.split("\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-2:] == ["data: [DONE]", ""]
    first = json.loads(events[0].removeprefix("data: "))
    assert first["id"] == answer.headers["x-request-id"]
    assert "usage" not in first


@pytest.mark.parametrize("stop", [" Paris", ["xyz", "of France is P"], "capital of"])
def test_stop_strings_are_never_shown_and_nothing_before_them_is_lost(ai, server, stop):
    full = chat(ai).choices[0].message.content
    cut = min(full.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in full)
    whole = chat(ai, stop=stop)
    chunks = list(chat(ai, stop=stop, stream=True))
    assert whole.choices[0].message.content == text_of(chunks) == full[:cut]
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert server.recorder.end_of(whole.id).reason == "stop"
    assert server.idle()


def test_what_only_looks_like_a_stop_string_is_shown(ai):
    full = chat(ai).choices[0].message.content
    chunks = list(chat(ai, stop="Paris, no", stream=True, max_tokens=24))
    assert text_of(chunks) == full
    ends_held = full[-3:] + "zzz"
    assert chat(ai, stop=ends_held).choices[0].message.content == full


def test_seeds_repeat_and_choices_differ(ai):
    def draw(seed: int) -> list[str]:
        answer = chat(ai, COUNT, n=3, seed=seed, temperature=1.5, max_tokens=5)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = draw(7)
    assert first == draw(7)
    assert len(set(first)) == 3
    assert draw(8) != first


def test_two_choices_stream_side_by_side(ai):
    chunks = list(chat(ai, COUNT, n=2, seed=3, temperature=1.2, max_tokens=10, stream=True))
    whole = chat(ai, COUNT, n=2, seed=3, temperature=1.2, max_tokens=10)
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]


def test_a_stop_string_ends_one_choice_and_not_the_other(ai, server):
    plain = chat(ai, COUNT, n=2, seed=3, temperature=1.2, max_tokens=16)
    a, b = (choice.message.content for choice in plain.choices)
    stop = next(a[i : i + 5] for i in range(2, len(a) - 5) if a[i : i + 5] not in b)
    answer = chat(ai, COUNT, n=2, seed=3, temperature=1.2, max_tokens=16, stop=stop)
    assert [c.message.content for c in answer.choices] == [a[: a.find(stop)], b]
    assert server.recorder.end_of(answer.id).completion_tokens == answer.usage.completion_tokens


def test_log_probabilities_have_the_chat_shape(ai):
    whole = chat(ai, logprobs=True, top_logprobs=3, max_tokens=5)
    content = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == whole.choices[0].message.content
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert math.isclose(entry.top_logprobs[0].logprob, entry.logprob, abs_tol=0.02)
    chunks = list(chat(ai, logprobs=True, top_logprobs=3, max_tokens=5, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in content]
    assert chat(ai, logprobs=True, max_tokens=2).choices[0].logprobs.content[0].top_logprobs == []


def test_log_probabilities_stop_where_the_text_stops(ai):
    answer = chat(ai, logprobs=True, stop=" of France")
    tokens = [entry.token for entry in answer.choices[0].logprobs.content]
    assert "".join(tokens) == answer.choices[0].message.content == "The capital"


def test_max_completion_tokens_and_length(ai):
    answer = chat(ai, max_tokens=None, max_completion_tokens=3)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


def test_a_bias_forces_a_token(ai, server):
    token = server.state.tokenizer.encode(" Paris")[0]
    answer = chat(ai, logit_bias={str(token): 100}, max_tokens=2)
    assert answer.choices[0].message.content == " Paris Paris"


def test_an_assistant_message_is_continued(ai):
    messages = [*PARIS, {"role": "assistant", "content": "The capital of France is"}]
    assert chat(ai, messages, max_tokens=2).choices[0].message.content.startswith(" Paris")


def test_text_parts_and_harmless_fields(ai):
    parts = [{"role": "user", "content": [{"type": "text", "text": PARIS[0]["content"]}]}]
    answer = chat(ai, parts, user="u", metadata={"a": "b"}, store=False)
    assert answer.choices[0].message.content == chat(ai).choices[0].message.content


def test_signals_are_the_token_records(http):
    body = {"messages": PARIS, "max_tokens": 4, "temperature": 0, "signals": True}
    whole = http.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["signals"] == [{"step": i} for i in range(4)]
    events = http.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[1:-2]]
    assert [r for c in chunks for r in c["choices"][0]["signals"]] == [{"step": i} for i in range(4)]


def test_a_character_cut_by_the_end_is_not_shown(ai, server):
    ids = server.state.tokenizer.encode("🎼")
    assert len(ids) > 1
    options = {"temperature": 0, "logit_bias": {str(ids[0]): 100}, "max_tokens": 1}
    chunks = list(chat(ai, stream=True, **options))
    assert text_of(chunks) == chat(ai, **options).choices[0].message.content == ""


def test_headers_become_meta(http, server):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {
        "x-quaver-route": "faq",
        "x-quaver-session": "s1",
        "traceparent": trace,
        "x-quaver-canary": "1",
        "x-api-key": "secret",
    }
    body = {"messages": PARIS, "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body, headers=headers)
    meta = server.recorder.started[answer.json()["id"]].meta
    assert (meta.tenant, meta.route, meta.session, meta.canary) == ("default", "faq", "s1", False)
    assert meta.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert meta.headers["traceparent"] == trace
    assert "x-api-key" not in meta.headers
    operator = headers | {"authorization": f"Bearer {server.key('operator')}"}
    answer = http.post("/v1/chat/completions", json=body, headers=operator)
    assert server.recorder.started[answer.json()["id"]].meta.canary
