"""What reaches the page as HTML, and its colours."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards import markup, palette
from dashboards.judge import Tile

NASTY = ['<script>alert("x")</script>', " a&b", "line\n", "\ttab", "", "'\"", "</span>", "é"]


def tokens(texts: list[str | None], **columns: list[float | None]) -> dict[str, list[object]]:
    count = len(texts)
    rest = {
        name: columns.get(name, [None] * count) for name in ("surprisal", "confidence", "rank", "entropy")
    }
    return {"choice": [0] * count, "step": list(range(count)), "text": list(texts), **rest}


def test_ribbon_escapes_every_token() -> None:
    html = markup.ribbon(tokens(list(NASTY), surprisal=[0.5] * len(NASTY)), "light")
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert html.count("</span>") == len(NASTY)
    assert html.count("<span") == len(NASTY)


@given(st.lists(st.text(max_size=12), max_size=6))
def test_no_text_of_a_token_becomes_markup(texts: list[str]) -> None:
    html = markup.ribbon(tokens(list(texts)), "dark")
    assert set(re.findall(r"<(/?\w+)", html)) <= {"div", "/div", "span", "/span", "br", "wbr"}
    assert html.count("<span") == len(texts)


def test_spaces_and_line_ends_are_visible() -> None:
    html = markup.ribbon(tokens([" a", "\n\n"]), "light")
    assert "·a" in html
    assert "⏎⏎" in html
    assert html.count("<br>") == 2


def test_without_text_a_token_is_its_index() -> None:
    html = markup.ribbon(tokens([None, None], surprisal=[0.1, None]), "light")
    assert "q-chips" in html
    assert ">0</span>" in html
    assert ">1</span>" in html
    assert "nan" not in html.lower()


def test_underline_is_a_second_cue() -> None:
    columns = {"confidence": [0.9, 0.9, 0.1, None], "rank": [1, 2, 1, None], "surprisal": [0.1] * 4}
    html = markup.ribbon(tokens(["a", "b", "c", "d"], **columns), "light")
    marked = re.findall(r'class="(q-tok[^"]*)"', html)
    assert ["q-doubt" in names for names in marked] == [False, True, True, False]


def test_colour_domain_is_fixed_and_clipped() -> None:
    assert palette.log_p_colour(0.0, "light") == palette.log_p_colour(3.0, "light") == palette.cividis(1.0)
    assert palette.log_p_colour(-5.0, "light") == palette.log_p_colour(-40.0, "light") == palette.cividis(0.0)
    assert palette.log_p_colour(0.0, "dark") == palette.cividis(0.0)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_ink_is_readable_on_every_fill(mode: palette.Mode) -> None:
    for step in range(101):
        fill = palette.log_p_colour(-5 * step / 100, mode)
        assert palette.contrast(fill, palette.ink_on(fill)) >= 4.5


def test_tiles_escape_and_skip_gaps() -> None:
    tile = Tile("<b>", "–", "", "none", "no traffic", [None, 1.0, None, 2.0], "<i>")
    html = markup.tile_row("A & B", [tile])
    assert "<b>" not in html
    assert "A &amp; B" in html
    assert "no traffic" in html
    assert 'height:0%"' in html


def test_facts_and_banner_escape() -> None:
    html = markup.facts([("<x>", "<y>"), ("none", None)]) + markup.banner("alarm", "<t>", "<u>")
    assert not re.search(r"<[xytu]>", html)
    assert "<dd>–</dd>" in html


def test_note_sets_code_and_nothing_else() -> None:
    assert markup.note("run `a<b` & c") == '<div class="q-note">run <code>a&lt;b</code> &amp; c</div>'


def test_plain_hides_markdown() -> None:
    assert markup.plain("[a](b) `c`") == r"\[a\]\(b\) \`c\`"
