"""What is wrong with a value from outside, in words: the field, what it may be, the names there are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from chaos.contract import StartFault
from chaos.faults.registry import KINDS, parse_fault
from chaos.selector import Selector
from engine.words import convert

START = {"kind": "noise", "ttl_s": 1.0}


@pytest.mark.parametrize(
    ("raw", "shape", "words"),
    [
        ({"share": 0}, Selector, "share has to be a number above 0 and of at most 1, not 0"),
        (
            {"tenant": 3},
            Selector,
            "tenant has to be a text of at least 1 and of at most 64 characters, not 3",
        ),
        ({"header": "x"}, Selector, "header has to be `x-name=value`, compared as the client sent it, not"),
        ({"ttl_s": 1}, StartFault, "'kind' is missing"),
        (
            START | {"stop": {"interruptions": "a"}},
            StartFault,
            "stop.interruptions has to be a number above 0",
        ),
        (
            START | {"params": {"sigma": [1]}},
            StartFault,
            "each of params has to be a number or a text or true or false",
        ),
        (START | {"a` - at `$.b": 1}, StartFault, "b: there is no 'a'"),
        (START | {"seed": "9" * 99}, StartFault, 'seed has to be a whole number, not "' + 59 * "9" + "…"),
        ([1], StartFault, "it has to be an object"),
        (
            {"side": "left"},
            KINDS["truncation"],
            'side has to be one of middle, needle, prefix, suffix, not "left"',
        ),
        ({}, KINDS["truncation"], "give ratio, budget or preset"),
    ],
)
def test_it_names_the_field_and_what_it_may_be(raw: Any, shape: type[Any], words: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(words)):
        convert(raw, shape)


def test_no_parameter_of_any_kind_is_refused_in_the_decoder_words() -> None:
    for kind, shape in KINDS.items():
        for name in shape.__struct_fields__:
            with pytest.raises(ValueError, match=rf"^{kind}: {name} has to be ") as caught:
                parse_fault(kind, {name: {}})
            assert "Expected" not in str(caught.value) and "something else" not in str(caught.value)
