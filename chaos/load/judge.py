"""What a reader makes of a text: it reads well, it repeats itself, or it is unreadable.

The rule is fixed here, once. It sees the reader's own question and the text on the screen, and
nothing else: no fault, no signal, no header.
"""

from __future__ import annotations

import re
from typing import Literal

Verdict = Literal["repeats", "unreadable"]

WINDOW_WORDS = 8  # the words a reader still has in mind
STRANGE_SHARE = 0.75  # of them, before the text counts as unreadable
ECHO_WORDS = 4  # a phrase of this many words …
ECHO_TIMES = 3  # … seen this often is a text that repeats itself

_SHAPE = re.compile(r"[A-Za-z][a-z]*(?:['’-][A-Za-z]?[a-z]*)*|[A-Z]{2,5}|[$€£]?\d[\d.,:/-]*%?")
_EDGES = ".,;:!?\"'()[]{}*_#`“”‘’…-–"
_STEM = 5

_COMMON = """
    a about above according across after again against ago all almost along already also although always
    am among an and another any anyone anything are around as ask at away back be because become been
    before began begin behind being below best better between big both but by call came can cannot city
    come could country day days did different do does doing done down during each early either else end
    enough even ever every everyone example fact far few find first five following for found four from
    full gave general get give given go going good got great had half hand has have having he her here
    high him his home hour hours how however hundred i if important in information into is it its itself
    just keep kind knew know known large last late later least left less let life like list little live
    lives long look made main make makes making man many may me mean means mentioned might million
    minutes month months more most much must my name named near need never new next no none nor not
    nothing now number of off often old on once one only open or order other our out over own part
    passage people per person place point possible provide provided question rather read right said same
    say says second see seen set several she should show since six small so some something state states
    still such take ten than that the their them then there these they thing things think this those
    thousand three through time to today together told too took two under until up upon us use used
    using very want was way we week well went were what when where whether which while who whole whom
    whose why will with within without word work works world would year years yes yet you your
"""
COMMON = frozenset(_COMMON.split())


def words(text: str) -> list[str]:
    """Return the words of a text, with the punctuation around them taken off."""
    return [word for word in (piece.strip(_EDGES) for piece in text.split()) if word]


def _stem(word: str) -> str:
    return word.lower()[:_STEM]


class Judge:
    """Reads along with one answer. `question` is what the reader asked, word for word."""

    def __init__(self, question: str) -> None:
        self._familiar = {_stem(word) for word in words(question)}

    def strange(self, word: str) -> bool:
        """Tell whether a word is neither shaped like one, nor common, nor from the question."""
        if not _SHAPE.fullmatch(word):
            return True
        return not (word[0].isdigit() or word.lower() in COMMON or _stem(word) in self._familiar)

    def verdict(self, text: str) -> Verdict | None:
        """Judge the text so far. The last word is left out: it may still be growing."""
        seen = words(text.rpartition(" ")[0])
        if self._repeats(seen):
            return "repeats"
        recent = seen[-WINDOW_WORDS:]
        if len(recent) < WINDOW_WORDS:
            return None
        strange = sum(map(self.strange, recent))
        return "unreadable" if strange >= STRANGE_SHARE * WINDOW_WORDS else None

    def _repeats(self, seen: list[str]) -> bool:
        phrase = seen[-ECHO_WORDS:]
        if len(phrase) < ECHO_WORDS:
            return False
        if len({word.lower() for word in phrase}) == 1:
            return True
        starts = range(len(seen) - ECHO_WORDS + 1)
        return sum(seen[start : start + ECHO_WORDS] == phrase for start in starts) >= ECHO_TIMES
