"""Authority, premise, and the chain of prompt faults."""

import time

import pytest

from chaos.faults.absent_slot import AbsentSlot, told_answer
from chaos.faults.authority import Authority
from chaos.faults.citation import Citation
from chaos.faults.facts import contradict
from chaos.faults.premise import Premise
from chaos.faults.text import pieces, sentences, subject
from chaos.prompt_hook import PromptHook
from chaos.prompts import SPLITS, cited, generate
from chaos.tokens import token_pieces
from engine.messages import AttachFault, RequestMeta

PASSAGE = "Mara Venn is a baker. Mara Venn lives in Torvik. Mara Venn is 34 years old."


def ask(question, passage=PASSAGE):
    return [{"role": "user", "content": f"{passage}\n\n{question}"}]


def attach(hook, kind, params=None, fault_id=None, **fields):
    message = AttachFault(
        fault_id=fault_id or kind, kind=kind, params=params or {}, **{"ttl_s": 60.0, **fields}
    )
    hook.attach(message)


def test_the_authority_contradicts_what_the_question_asks_for():
    content = Authority().rewrite(ask("How old is Mara Venn?"), 5, pieces)[0]["content"]
    passage, asked = content.split("\n\n")
    assert passage.startswith(PASSAGE)
    claim = passage[len(PASSAGE) :]
    assert "has established: Mara Venn is " in claim
    assert "years old." in claim
    assert "34" not in claim
    assert asked == "How old is Mara Venn?"


def test_its_control_cites_the_same_body_without_a_fact():
    fault = Authority().rewrite(ask("Where does Mara Venn live?"), 5, pieces)[0]["content"]
    control = Authority(harmless=True).rewrite(ask("Where does Mara Venn live?"), 5, pieces)[0]["content"]
    body = fault[len(PASSAGE) :].split(" has established")[0]
    assert control[len(PASSAGE) :].startswith(body)
    assert "Mara" not in control[len(PASSAGE) :].split("\n\n")[0]


def test_an_invented_law_where_nothing_can_be_contradicted():
    content = Authority().rewrite([{"role": "user", "content": "Why?"}], 1, pieces)[0]["content"]
    assert "has established: by " in content
    assert content.endswith(" Why?")


def test_the_premise_goes_into_the_question():
    content = Premise().rewrite(ask("Question: Where does Mara Venn live?"), 2, pieces)[0]["content"]
    passage, asked = content.split("\n\n")
    assert passage == PASSAGE
    assert asked.startswith("Question: Remember that Mara Venn lives in ")
    assert asked.endswith(". Where does Mara Venn live?")
    assert "Torvik" not in asked
    control = Premise(harmless=True).rewrite(ask("Where does Mara Venn live?"), 2, pieces)[0]["content"]
    assert control.endswith("Remember that Mara Venn lives in Torvik. Where does Mara Venn live?")
    assert Premise().rewrite([{"role": "user", "content": "Why?"}], 2, pieces) is None


@pytest.mark.parametrize("split", SPLITS)
def test_an_absent_slot_is_asked_of_the_passage_s_own_subject(split):
    for item in generate(split, 60):
        name = subject(item.passage, item.question)
        assert name.removeprefix("the ") in item.question
        passage, asked = AbsentSlot().rewrite(item.messages, 4, pieces)[-2]["content"].split("\n\n")
        assert passage == item.passage
        assert name in asked
        assert asked != item.question
        control = AbsentSlot(answered=True).rewrite(item.messages, 4, pieces)[-2]["content"]
        given, same = control.split("\n\n")
        assert same == asked
        assert len(sentences(given)) == len(item.sentences)
        assert sum(old not in given for old in item.sentences) == 1
        answer = told_answer(control)
        assert answer in given and answer not in item.passage
        assert told_answer(f"{passage}\n\n{asked}") is None


def test_an_absent_slot_needs_a_passage_that_names_something():
    assert AbsentSlot().rewrite([{"role": "user", "content": "why is it so?"}], 1, pieces) is None
    assert AbsentSlot().rewrite([{"role": "system", "content": "Be brief."}], 1, pieces) is None


def test_a_fabricated_citation_names_no_document_that_is_there():
    for item in map(cited, generate("demo", 60)):
        content = Citation().rewrite(item.messages, 8, pieces)[-2]["content"]
        wanted = content.removeprefix(item.messages[-2]["content"])
        assert wanted.startswith(" Answer from document K-")
        assert item.document not in wanted
        control = Citation(existing=True).rewrite(item.messages, 8, pieces)[-2]["content"]
        assert control.endswith(f" Answer from document {item.document} and cite it.")
        assert len(control) == len(content)
    content = Citation(existing=True).rewrite(ask("Why?"), 8, pieces)[0]["content"]
    assert content.endswith("Why? Answer from the text above and cite it.")


@pytest.mark.parametrize("fault", [Authority, Premise])
def test_contradictions_meet_the_answer_in_most_prompts(fault):
    items = generate("test", 150)
    met = 0
    for item in items:
        before = item.messages[-2]["content"]
        after = fault().rewrite(item.messages, 9, pieces)[-2]["content"]
        assert after == fault().rewrite(item.messages, 9, pieces)[-2]["content"]
        added = after.replace(before.split("\n\n")[0], "", 1)
        sentence = item.sentences[item.answer_at]
        head = sentence.split(item.answers[0])[0][:12]
        met += item.answers[0] not in added and (head in added or not head)
    assert met / len(items) >= 0.75


def test_contradiction_swaps_within_a_class_and_negates_at_last():
    assert contradict("It opens on Monday.", "", 1).startswith("It opens on ")
    assert "Monday" not in contradict("It opens on Monday.", "", 1)
    assert contradict("The well is deep.", "", 1) == "The well is not deep."
    assert contradict("Nothing here", "", 1) == "it is not true that Nothing here"
    assert contradict("It began in 1987.", "", 1).startswith("It began in 19")
    assert contradict("In 1999 it had 5 rooms.", "What happened in 1999?", 1).startswith("In 1999 it had ")


def test_no_match_returns_the_very_list():
    hook = PromptHook()
    messages = ask("Why?")
    assert hook.apply(RequestMeta(request_id="r"), messages) == (messages, [])
    attach(hook, "authority", selector={"tenant": "gold"})
    result, touched = hook.apply(RequestMeta(request_id="r"), messages)
    assert result is messages
    assert touched == []


@pytest.mark.parametrize("kinds", [("truncation", "authority"), ("authority", "truncation")])
def test_kinds_compose_in_one_order_whatever_came_first(kinds):
    hook = PromptHook()
    applied = []
    hook.applied = lambda request_id, fault_id: applied.append((request_id, fault_id))
    for kind in kinds:
        attach(hook, kind, {"side": "prefix", "ratio": 0.5} if kind == "truncation" else {})
    messages, touched = hook.apply(RequestMeta(request_id="r"), ask("How old is Mara Venn?"))
    assert touched == ["authority", "truncation"]
    assert applied == [("r", "authority"), ("r", "truncation")]
    assert "has established" in messages[0]["content"]
    assert not messages[0]["content"].startswith("Mara Venn is a baker.")


def test_prompt_leases_end_by_themselves():
    hook = PromptHook()
    attach(hook, "premise", ttl_s=0.03)
    time.sleep(0.04)
    messages = ask("Where does Mara Venn live?")
    assert hook.apply(RequestMeta(request_id="r"), messages)[0] is messages
    assert hook.expire(time.monotonic())


class Bytes:
    """A tokenizer of single bytes: the hardest case for characters of several bytes."""

    def encode(self, text, *, special=True):
        return list(text.encode())

    def token_bytes(self, token_id):
        return bytes([token_id])


def test_token_borders_never_break_a_character():
    cut = token_pieces(Bytes())
    assert cut("añ😀b") == ["a", "ñ", "😀", "b"]


def test_a_tokenizer_that_does_not_spell_the_text_is_not_used():
    class Lowering(Bytes):
        def encode(self, text, *, special=True):
            return list(text.lower().encode())

    assert token_pieces(Lowering())("Hello you") == pieces("Hello you")
