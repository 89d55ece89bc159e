"""Markdown of an answer: blocks as it grows, lines that control no terminal, no text lost."""

from __future__ import annotations

import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dflash_runtime.cli.talk.markdown import BlockSplitter, markdown_lines, plain_lines
from support.hostile_texts import HOSTILE

CONSOLE = Console(file=io.StringIO(), width=60, force_terminal=True, color_system="256")


def split(text: str, size: int = 1) -> tuple[list[str], str]:
    """Blocks that became complete while the text came in pieces, and the last one."""
    splitter = BlockSplitter()
    pieces = [text[first : first + size] for first in range(0, len(text), size)]
    blocks = [block for piece in pieces for block in splitter.push(piece)]
    return blocks, splitter.finish()


def shown(text: str) -> str:
    lines = markdown_lines(text, CONSOLE, CONSOLE.options)
    return "\n".join("".join(segment.text for segment in line) for line in lines)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("one\n\ntwo\n\nthree\n", ["one\n\n", "two\n\n", "three\n"]),
        ("one\ntwo", ["one\ntwo"]),
        ("one\n\ntwo", ["one\n\ntwo"]),
        ("```\na\n\nb\n```\n\nafter\n", ["```\na\n\nb\n```\n\n", "after\n"]),
        ("````\na\n```\n\nb\n````\n\nafter\n", ["````\na\n```\n\nb\n````\n\n", "after\n"]),
        ("~~~\na\n\n```\n\nb\n~~~\n\nafter\n", ["~~~\na\n\n```\n\nb\n~~~\n\n", "after\n"]),
        ("```inline``` text\n\nafter\n", ["```inline``` text\n\n", "after\n"]),
        ("- a\n\n  more of a\n\n- b\n", ["- a\n\n  more of a\n\n", "- b\n"]),
        ("- ```\n  x\n\n  ```\n\nafter\n", ["- ```\n  x\n\n  ```\n\n", "after\n"]),
        ("\n\n\none\n\n\n\ntwo\n", ["one\n\n\n\n", "two\n"]),
        ("", [""]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_block_ends_where_later_text_cannot_change_it(
    text: str, blocks: list[str], size: int
) -> None:
    complete, last = split(text, size)
    assert [*complete, last] == blocks


TEXTS = st.text(st.sampled_from("ab \t\n`~#*-1.>|\\<&;\x1b\r")) | st.text()


@given(TEXTS, st.integers(1, 7))
def test_blocks_are_the_text_however_it_comes(text: str, size: int) -> None:
    complete, last = split(text, size)
    assert ("".join(complete) + last).lstrip() == text.lstrip()
    assert split(text, 10_000) == (complete, last)


@given(TEXTS)
def test_no_text_controls_the_terminal(text: str) -> None:
    for lines in (
        markdown_lines(text, CONSOLE, CONSOLE.options),
        plain_lines(text, CONSOLE, CONSOLE.options),
    ):
        for line in lines:
            for segment in line:
                assert segment.style is None or segment.style.link is None
                odd = {c for c in segment.text if c < " " or "\x7f" <= c <= "\x9f"}
                assert not odd, (odd, text)


def test_a_hostile_text_in_every_place_of_markdown_is_harmless() -> None:
    text = "".join(
        form.format(HOSTILE.replace("{}", "").replace("\n", " "))
        for form in ("# {}\n\n", "`{}`\n\n", "```{0}\n{0}\n```\n\n", "- {}\n\n", "> {}\n\n",
                     "[{0}](http://x/{0})\n\n", "|a|\n|-|\n|{}|\n\n", "![{0}](y)\n\n")
    )  # fmt: skip
    for line in markdown_lines(text, CONSOLE, CONSOLE.options):
        for segment in line:
            assert not {c for c in segment.text if c < " " or "\x7f" <= c <= "\x9f"}
    assert "&#27;" not in shown("a &#27;[31m b")
    assert "\x1b" not in shown("a &#27;[31m &#x9b;31m b")


def test_tags_line_breaks_and_addresses_of_links_are_shown() -> None:
    assert shown("a std::vector<int> and <b>bold</b>") == "a std::vector<int> and <b>bold</b>"
    assert shown("one\ntwo") == "one\ntwo"
    assert shown("see [this](http://x.example/a)") == "see this (http://x.example/a)"
    assert shown("3. three\n4. four").split() == ["3", "three", "4", "four"]
    assert shown("[bold]x[/bold] :smile:") == "[bold]x[/bold] :smile:"


def test_lines_keep_to_the_width() -> None:
    text = "word " * 100 + "\n\n```python\n" + "x = 1 + " * 30 + "2\n```\n\n|a|b|\n|-|-|\n|c|d|\n"
    for line in markdown_lines(text, CONSOLE, CONSOLE.options):
        assert sum(segment.cell_length for segment in line) <= 60


@pytest.mark.parametrize(
    "text", ["[" * 200_000, "*a" * 100_000, "|a" * 50_000 + "\n" + "|-" * 50_000, ">" * 200_000]
)
def test_a_block_without_end_takes_no_time_that_grows_with_its_square(text: str) -> None:
    begun_s = time.process_time()
    assert shown(text).replace("\n", "").replace(" ", "")[:10] == text[:10]
    assert time.process_time() - begun_s < 5  # as Markdown: minutes


def test_code_is_rendered_however_long() -> None:
    text = shown("```python\n" + "x = 1\n" * 1500 + "```\n")
    assert text.count("x = 1") == 1500
    assert "```" not in text
