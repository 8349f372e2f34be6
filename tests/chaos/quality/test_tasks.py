from __future__ import annotations

import pytest

from chaos.prompts import GROUPS, stream
from chaos.quality.constraints import CONSTRAINTS, Constraint
from chaos.quality.tasks import PROBES, Task, tasks, traceable

BROKEN = {
    "words": "It is Oskar Draper who lives there.",
    "lower": "he lives in Lyon.",
    "upper": "HE LIVES IN Lyon.",
    "include": "He lives in Lyon, says the passageway.",
    "begin": "The answer: Lyon",
    "end": "The end. Lyon",
    "bullets": "Here it is:\n- Lyon\n- France",
    "json": '{"answer": "Lyon"} is the JSON',
}


def right(task: Task) -> str:
    """Return a good reply to a task, from what its prompt shows."""
    asked = task.question.messages
    match task.probe:
        case "role":
            return asked[2 if task.part == "stays" else 4]["content"]
        case "instruction":
            return asked[1]["content"]
    raise AssertionError(task.probe)


def test_the_same_seed_asks_the_same_and_another_does_not() -> None:
    def asked(seed: int) -> list[tuple[str, str, int | None]]:
        return [(t.id, t.question.text, t.question.seed) for t in tasks(16, seed)]

    assert asked(3) == asked(3)
    assert asked(3) != asked(4)


def test_every_probe_has_its_number_of_tasks_with_names_of_their_own() -> None:
    found = tasks(24)
    assert {probe: sum(t.probe == probe for t in found) for probe in PROBES} == dict.fromkeys(PROBES, 24)
    assert len({task.id for task in found}) == len(found)
    families = {task.family for task in found if task.probe in ("facts", "citation", "instruction", "absent")}
    assert families <= {*GROUPS["demo"], "list"} and len(families) > 3
    assert not families & {*GROUPS["test"], *GROUPS["tuning"]}


def test_silence_and_babble_are_never_good() -> None:
    for task in tasks(24):
        for reply in ("", "\n", "The the the, of And Then some more of the same words again and again"):
            assert not task.check(reply), (task.id, reply)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: constraint.name)
def test_examples_keep_their_instruction_and_breaches_are_seen(constraint: Constraint) -> None:
    for item, _ in zip(stream("demo"), range(60), strict=False):
        example = constraint.example(item)
        assert constraint.check(example) == (constraint.name != "words" or len(example.split()) <= 4)
    assert not constraint.check(BROKEN[constraint.name])


def test_good_replies_are_good() -> None:
    for task in tasks(32, probes=("role", "instruction")):
        if task.part != "words":
            assert task.check(right(task)), task.id


def test_facts_are_checked_against_the_passage() -> None:
    task = next(t for t in tasks(8, probes=("facts",)) if t.family != "list")
    passage, _, _ = task.question.messages[1]["content"].partition("\n\n")
    assert task.check(passage.replace(". ", ", "))  # one sentence that says all the passage does
    assert not task.check("it was somebody else.")


def test_citations_resolve_or_do_not() -> None:
    assert traceable("K-117 says so, and again K-117.", {"K-117"})
    assert not traceable("K-117 and K-118 say so.", {"K-117"})
    assert not traceable("The passage says so.", {"K-117"})
    assert not traceable("K-1170 says so.", {"K-117"})
