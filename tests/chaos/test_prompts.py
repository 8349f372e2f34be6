"""The prompt library and the probes."""

from itertools import combinations

import pytest

from chaos.probes import Verdict, accuracy, first_sentence, judge, proportion
from chaos.prompts import FAMILIES, GROUPS, ROUTES, SPLITS, absent, answered, cited, generate


def contents(split):
    return generate(split, 300, routes=ROUTES)


def test_same_seed_same_items_other_seed_other_items():
    assert generate("demo", 50, 3, routes=ROUTES) == generate("demo", 50, 3, routes=ROUTES)
    assert generate("demo", 50, 3) != generate("demo", 50, 4)


def test_families_are_held_out_by_name():
    calibration, tuning, test = (set(GROUPS[split]) for split in ("calibration", "tuning", "test"))
    assert not calibration & tuning
    assert not calibration & test
    assert not tuning & test
    assert calibration | tuning | test == set(FAMILIES)
    for split in SPLITS:
        assert {item.family for item in generate(split, 200)} == set(GROUPS[split])
    with pytest.raises(ValueError, match="no family of test: zoo"):
        generate("test", 1, families=("zoo",))


def test_no_prompt_occurs_in_two_splits_and_demo_has_no_answer_of_calibration():
    answers, texts = {}, {}
    for split in SPLITS:
        items = contents(split)
        answers[split] = {(item.family, item.slot, answer) for item in items for answer in item.answers}
        texts[split] = {item.messages[-2]["content"] for item in items}
    for one, other in combinations(SPLITS, 2):
        if (one, other) != ("demo", "tuning"):  # which share what is no question
            assert not texts[one] & texts[other]
    assert not answers["calibration"] & answers["demo"]


def test_each_family_has_twenty_items_and_more():
    for split in SPLITS:
        for family in GROUPS[split]:
            items = generate(split, 60, families=(family,))
            assert len({item.messages[-2]["content"] for item in items}) >= 20, family


@pytest.mark.parametrize("split", SPLITS)
def test_twins_differ_from_their_item_where_they_should(split):
    for item in generate(split, 100):
        twin, control, citing = absent(item), answered(item), cited(item)
        assert twin.passage == control_without(control, item) == item.passage
        assert twin.question == control.question != item.question
        assert (twin.check, twin.answers) == ("abstain", ())
        assert f" {item.absent.answer}" not in item.passage
        assert control.answers[0] in control.messages[-2]["content"].split("\n\n")[0]
        assert citing.messages[-2]["content"].startswith(f"Document {item.document}: {item.passage}")
        assert citing.answers == (item.document, *item.answers)
        assert judge(citing, f" {item.document}, it is {item.answers[0]}.").correct
        assert not judge(citing, f" K-99, it is {item.answers[0]}.").correct
        assert judge(twin, " that is not mentioned.").correct
        assert not judge(twin, f" it is {item.absent.answer}.").correct
    with pytest.raises(ValueError, match="has no twins"):
        absent(generate(split, 1, routes=("list",))[0])


def control_without(control, item):
    """Return the control's passage with the item's own needle in the place of the other answer."""
    at = item.answer_at
    return " ".join((*control.sentences[:at], item.sentences[at], *control.sentences[at + 1 :]))


@pytest.mark.parametrize("split", SPLITS)
def test_items_are_what_they_say(split):
    for item in contents(split):
        passage, question = item.messages[-2]["content"].split("\n\n")
        assert passage == " ".join(item.sentences)
        assert item.messages[-1]["role"] == "assistant"
        assert (
            all(answer in item.sentences[item.answer_at] for answer in item.answers) or item.check == "format"
        )
        assert item.answer_at != item.distractor_at
        assert not any(answer in item.sentences[item.distractor_at] for answer in item.answers)
        if item.check != "format":
            assert not any(f" {answer}" in question for answer in item.answers)
            assert item.answer_at >= len(item.sentences) - 2


def test_the_answer_may_stand_anywhere():
    places = {item.answer_at for item in generate("test", 200, late=False)}
    assert places == {1, 2, 3, 4}


def test_every_family_and_slot_takes_its_turn():
    asked = {(family, slot) for family in GROUPS["demo"] for slot in FAMILIES[family].asked}
    assert {(item.family, item.slot) for item in generate("demo", len(asked))} == asked


def answer_of(item):
    if item.check == "format":
        return f" {item.answers[0]}\ncity: {item.answers[1]}\n"
    return f" it is {', '.join(item.answers)}. And more."


def test_right_answers_pass_and_wrong_ones_fail():
    items = generate("calibration", 90, routes=ROUTES)
    for item in items:
        assert judge(item, answer_of(item)) == Verdict(True, False)
        assert not judge(item, " it is something else.").correct
        assert not judge(item, "").correct
        if item.check == "slot":
            assert not judge(item, f" nobody knows. Or {item.answers[0]}.").correct


def test_a_number_is_not_found_inside_another():
    item = next(item for item in generate("tuning", 100) if item.slot == "staff")
    assert not judge(item, f" it has 1{item.answers[0]} employees.").correct
    year = next(item for item in generate("tuning", 100) if item.slot == "founded")
    assert judge(year, f" the year is {year.answers[0]}.").correct


@pytest.mark.parametrize(
    "reply",
    [
        " the age is not mentioned.",
        " this does not say where.",
        " it cannot be determined.",
        " I don't know.",
    ],
)
def test_abstaining_is_heard(reply):
    assert judge(generate("test", 1)[0], reply).abstained


def test_first_sentence():
    assert first_sentence("It is 3.5 km. Not more.") == "It is 3.5 km. "
    assert first_sentence("") == ""


def test_wilson_interval():
    found = accuracy([Verdict(True, False)] * 8 + [Verdict(False, False)] * 2)
    assert (found.total, found.correct, found.rate) == (10, 8, 0.8)
    assert found.low == pytest.approx(0.4902, abs=1e-3)
    assert found.high == pytest.approx(0.9433, abs=1e-3)
    assert proportion(0, 0).rate is None
    assert proportion(5, 5).high == 1.0
