"""Truncation: what is removed is the side named, and never more than content."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.faults.registry import parse_fault
from chaos.faults.text import pieces, question_start, sentences
from chaos.faults.truncation import Truncation
from chaos.prompts import SPLITS, generate

words = st.lists(
    st.text(st.characters(categories=["Lu", "Ll", "Lo", "Nd", "So"]), min_size=1, max_size=9),
    min_size=1,
    max_size=9,
)
sentence = words.map(lambda found: " ".join(found) + ".")
passage = st.lists(sentence, min_size=1, max_size=8).map(" ".join)
question = words.map(lambda found: " ".join(found) + "?")
sides = st.sampled_from(["prefix", "suffix", "middle"])
units = st.sampled_from(["sentences", "tokens"])
ratios = st.floats(0.01, 0.99)


def ask(text, asked):
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{text}\n\n{asked}"},
        {"role": "assistant", "content": "According to the passage,"},
    ]


@given(passage, question, sides, units, ratios)
def test_the_named_side_goes_and_the_rest_stays(text, asked, side, unit, ratio):
    messages = ask(text, asked)
    copy = [dict(message) for message in messages]
    changed = Truncation(unit=unit, side=side, ratio=ratio).rewrite(messages, 1, pieces)
    assert messages == copy
    body = f"{text}\n\n"
    parts = pieces(body) if unit == "tokens" else [body[slice(*span)] for span in sentences(body)]
    stay = 2 if side == "middle" else 1
    gone = min(max(0, len(parts) - stay), math.ceil(ratio * len(parts) - 1e-9))
    if changed is None:
        assert gone == 0
        return
    assert changed[0] == messages[0]
    assert changed[-1] == messages[-1]
    content = changed[1]["content"]
    assert content.endswith(asked)
    kept = content[: len(content) - len(asked)]
    left = len(parts) - gone
    if side == "prefix":
        assert kept == "".join(parts[gone:])
    elif side == "suffix":
        assert kept == "".join(parts[:left])
    else:
        head = max(1, left // 2)
        assert kept in {
            "".join(parts[:at] + parts[at + gone :]) for at in (head, head + 1, head - 1) if at > 0
        }
        assert kept.startswith(parts[0])
        assert kept.endswith(parts[-1])


@given(st.text(max_size=300))
def test_sentences_and_pieces_cover_any_text(text):
    assert "".join(pieces(text)) == text
    spans = sentences(text)
    if text.strip():
        assert "".join(text[slice(*span)] for span in spans) == text
    assert 0 <= question_start(text) <= len(text)


@given(
    st.text(min_size=1, max_size=200),
    sides,
    units,
    ratios,
    st.tuples(st.booleans(), st.booleans(), st.sampled_from(["user", "context"])),
)
def test_nothing_is_ever_emptied(text, side, unit, ratio, more):
    keep, spare, reach = more
    fault = Truncation(
        unit=unit, side=side, ratio=ratio, keep_question=keep, spare_question=spare, reach=reach
    )
    messages = [{"role": "prompt", "content": text}]
    changed = fault.rewrite(messages, 0, pieces)
    if changed is not None and text.strip():
        assert "".join(message["content"] for message in changed) != text
        assert any(message["content"].strip() for message in changed) or not keep
        assert len("".join(message["content"] for message in changed)) < len(text)


def test_budget_keeps_at_most_its_tokens():
    text = " ".join(f"word{number}" for number in range(300))
    fault = Truncation(unit="tokens", side="prefix", budget=100)
    changed = fault.rewrite(ask(text, "What now?"), 0, pieces)
    kept = changed[1]["content"].removesuffix("What now?")
    assert len(pieces(kept)) == 100
    assert kept.rstrip().endswith("word299")
    assert fault.rewrite(ask("Only a few words.", "What now?"), 0, pieces) is None


def test_sentences_within_a_budget_go_whole():
    text = "One two three. Four five six. Seven eight nine. Ten eleven twelve."
    changed = Truncation(side="suffix", budget=9).rewrite(ask(text, "Why?"), 0, pieces)
    assert changed[1]["content"] == "One two three. Four five six. Why?"


def test_presets_follow_the_intent():
    text = " ".join(f"Sentence {number} is here." for number in range(20))
    first = Truncation(preset="prefix15").rewrite(ask(text, "Why?"), 0, pieces)[1]["content"]
    assert first.startswith("Sentence 3 is here.")
    window = Truncation(preset="window").rewrite(ask(text, "Why?"), 0, pieces)[1]["content"]
    assert window.startswith("Sentence 6 is here.")  # 30 % go although all of it would have fitted
    long = " ".join(f"Sentence {number} is here." for number in range(1000))
    tail = Truncation(preset="window").rewrite(ask(long, "Why?"), 0, pieces)[1]["content"]
    assert tail.endswith("Sentence 999 is here.\n\nWhy?")
    assert len(pieces(tail)) <= 2048 + len(pieces("Why?"))


def test_context_reach_drops_the_oldest_messages_but_not_the_prefill():
    messages = [
        {"role": "system", "content": "You are a pirate. Always rhyme."},
        {"role": "user", "content": "Hello there. I am Bo."},
        {"role": "assistant", "content": "Ahoy. Welcome aboard."},
        {"role": "user", "content": "My ship is old. It leaks.\n\nWhat is my name?"},
        {"role": "assistant", "content": "Your name"},
    ]
    changed = Truncation(side="prefix", ratio=0.5, reach="context").rewrite(messages, 0, pieces)
    assert [message["content"] for message in changed] == [
        "Ahoy. Welcome aboard.",
        "My ship is old. It leaks.\n\nWhat is my name?",
        "Your name",
    ]


def test_the_question_can_be_cut_too():
    messages = [{"role": "user", "content": "A is B. C is D.\n\nWhat is A?"}]
    changed = Truncation(side="suffix", ratio=0.3, keep_question=False).rewrite(messages, 0, pieces)
    assert changed == [{"role": "user", "content": "A is B. C is D.\n\n"}]


def test_abbreviations_decimals_and_other_scripts():
    text = "Dr. A. Smith paid 3.5 dollars. He left!  这是第一句。这是第二句。 Done"
    assert [text[slice(*span)].strip() for span in sentences(text)] == [
        "Dr. A. Smith paid 3.5 dollars.",
        "He left!",
        "这是第一句。",
        "这是第二句。",
        "Done",
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_it_takes_the_answer_and_its_control_does_not(split):
    fault = Truncation(side="suffix", ratio=0.4)
    control = Truncation(side="suffix", ratio=0.4, spare_question=True)
    items = generate(split, 120)
    spared = lengths = 0
    for item in items:
        answer = item.sentences[item.answer_at]
        cut = fault.rewrite(item.messages, 3, pieces)
        assert answer not in cut[-2]["content"]
        harmless = control.rewrite(item.messages, 3, pieces)
        spared += answer in harmless[-2]["content"]
        lengths += len(harmless[-2]["content"]) - len(cut[-2]["content"])
        assert harmless[-2]["content"].endswith(item.messages[-2]["content"].split("\n\n")[-1])
    assert spared / len(items) >= 0.97
    assert abs(lengths / len(items)) < 15  # characters


@pytest.mark.parametrize("split", SPLITS)
def test_the_needle_goes_wherever_it_stands_and_its_control_spares_it(split):
    items = generate(split, 120, late=False)
    gone = 0
    for item in items:
        answer, before = item.sentences[item.answer_at], item.messages[-2]["content"]
        cut = Truncation(side="needle").rewrite(item.messages, 3, pieces)[-2]["content"]
        gone += answer not in cut
        assert sum(sentence not in cut for sentence in item.sentences) == 1
        spared = Truncation(side="needle", spare_question=True).rewrite(item.messages, 3, pieces)
        assert answer in spared[-2]["content"]
        assert len(spared[-2]["content"]) < len(before)
    assert gone / len(items) >= 0.95


@pytest.mark.parametrize(
    "params",
    [
        {"side": "needle", "unit": "tokens"},
        {"side": "needle", "preset": "window"},
        {},
        {"ratio": 1.0},
        {"ratio": -0.1},
        {"budget": -1},
        {"side": "left", "ratio": 0.5},
        {"preset": "x"},
    ],
)
def test_wrong_numbers_are_refused(params):
    with pytest.raises(ValueError, match="truncation"):
        parse_fault("truncation", params)


def test_a_conversation_without_a_user_is_left_alone():
    assert Truncation(ratio=0.5).rewrite([{"role": "system", "content": "A. B. C."}], 0, pieces) is None


def test_parameters_have_a_schema():
    schema = msgspec.json.schema(Truncation)["$defs"]["Truncation"]["properties"]
    assert "removed" in schema["side"]["description"]
