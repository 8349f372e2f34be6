"""Text completions: prompts of every form, echo, the older log-probability shape."""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"


def complete(ai, prompt=PROMPT, **options):
    options = {"model": "smollm2-135m", "temperature": 0, "max_tokens": 5} | options
    return ai.completions.create(prompt=prompt, **options)


def test_text_ids_and_lists_are_the_same_prompt(ai, server):
    answer = complete(ai)
    ids = server.state.tokenizer.encode_prompt(PROMPT)
    text = answer.choices[0].text
    assert text.startswith(" Paris")
    assert complete(ai, ids).choices[0].text == text
    both = complete(ai, [PROMPT, "One, two,"], n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices[:2]] == [text, text]
    assert both.choices[2].text == both.choices[3].text != text
    assert [c.text for c in complete(ai, [ids, ids]).choices] == [text, text]
    assert both.usage.prompt_tokens == len(ids) + len(server.state.tokenizer.encode_prompt("One, two,"))


def test_seeds_are_not_shared_between_prompts(ai):
    answer = complete(ai, ["Once", "Once"], temperature=1.5, seed=5, max_tokens=12)
    assert answer.choices[0].text != answer.choices[1].text
    again = complete(ai, ["Once", "Once"], temperature=1.5, seed=5, max_tokens=12)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]


def test_echo_comes_first_in_both_forms(ai):
    plain = complete(ai).choices[0].text
    assert complete(ai, echo=True).choices[0].text == PROMPT + plain
    assert "".join(chunk.choices[0].text for chunk in complete(ai, echo=True, stream=True)) == PROMPT + plain


def test_streams_end_with_a_reason(ai):
    chunks = list(complete(ai, stream=True, stream_options={"include_usage": True}))
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert {chunk.object for chunk in chunks} == {"text_completion"}


def test_log_probabilities_have_the_completions_shape(ai):
    answer = complete(ai, logprobs=2).choices[0]
    assert "".join(answer.logprobs.tokens) == answer.text
    for i, token in enumerate(answer.logprobs.tokens):
        assert answer.text[answer.logprobs.text_offset[i] :].startswith(token)
        best = answer.logprobs.top_logprobs[i]
        assert len(best) == 2
        assert max(best, key=best.get) == token
        assert math.isclose(best[token], answer.logprobs.token_logprobs[i])
    chunks = list(complete(ai, logprobs=2, stream=True))
    offsets = [o for c in chunks if c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset]
    assert offsets == answer.logprobs.text_offset


def test_sixteen_tokens_unless_told_otherwise(ai):
    assert complete(ai, max_tokens=None).usage.completion_tokens <= 16
