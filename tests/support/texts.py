"""Random texts of characters that tokenizers treat differently.

Does not import the packages under test.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

CORPUS = [
    "The quick brown fox jumps over the lazy dog; don't tell him, he'll know it's you've 1234.",
    "def tokenize(text: str) -> list[int]:\n    return [ord(c) for c in text]\n\n\n",
    "Gr\u00f6\u00dfe, na\u00efve caf\u00e9, fa\u00e7ade. \u041f\u0440\u0438\u0432\u0435\u0442, "
    "\u043c\u0438\u0440! \u042d\u0442\u043e \u043f\u0440\u043e\u0432\u0435\u0440\u043a\u0430.",
    "你好\uff0c世界。今天天气很好。こんにちは世界",
    "1 22 333 4444 55555 3.14159 0x7fff 10^-3 ½ ٣٤ 五  \t\t tabs\r\nand   many    spaces     ",
    "😀😃 👩‍👩‍👧 flags 🇩🇪🇫🇷 e\u0301 combining \u200b zero\u00a0width \ufeff",
]
"""Lines in several scripts, and of code."""

_KINDS: list[Iterable[str]] = [
    " \n\r\t'",
    "stmdrevlSTMDREVL",
    "abcxyzABCXYZ",
    "éßñДЖдж\u01c5\u02b0ªאب",
    "漢字あア한",
    "0123456789",
    "½²٣五Ⅳ①",
    "!?.,-/*#$+<=>^~|`@\\\"'()[]{}:;_&%",
    "。\u3001\uff01«»—…€§°",
    "\u3000\u00a0\u2028\u0085\u2003\u200b\u200d\ufeff",
    "\u0301\u0308\u0e33\u094d\u20e3\ufe0f",
    "😀👩🏽🇩🇪🏳",
    "\x00\x1b\x1c\x7f\u0378\ue000\U000e0001\U0010ffff\u1c89\U00010d40\u0897\u2581",
    [
        "'s",
        "'S",
        "'T",
        "'LL",
        "'re",
        " the",
        "HELLO",
        "World",
        "1234",
        "//",
        "\r\n",
        "    ",
        "\n\n",
        "!\n/",
        "!!!!!",
    ],
    ["\tif (x != 0) {\n", "a[i] += 1;", "https://x.org/a?b=c", "camelCase", "snake_case", "<0x0A>"],
]


def random_texts(quick_count: int) -> list[object]:
    """Test parameters (seed, number of texts): few texts, and 20,000 in slow runs."""
    slow = [pytest.param((seed, 2500), marks=pytest.mark.slow) for seed in range(1, 9)]
    return [pytest.param((0, quick_count)), *slow]


def random_text(rng: random.Random, special: list[str]) -> str:
    """A text of a few words, each of few kinds of characters, and sometimes any other character.

    Some include parts of the corpus, and `special` tokens, whole or cut.
    """
    kinds = [rng.sample(_KINDS, rng.randint(1, 4)) for _ in range(rng.randint(1, 6))]
    text = "".join(
        rng.choice([*rng.choice(of_word)]) for of_word in kinds for _ in range(rng.randint(1, 12))
    )
    if rng.random() < 0.1:
        codes = (rng.randrange(0x110000) for _ in range(8))
        text += "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    for _ in range(rng.randrange(3)):
        line = rng.choice(CORPUS)
        place = rng.randrange(len(line))
        text += line[place : place + rng.randrange(30)]
    while special and rng.random() < 0.4:
        spelling = rng.choice(special)
        if rng.random() < 0.3:
            spelling = spelling[: rng.randrange(len(spelling) + 1)]
        place = rng.randrange(len(text) + 1)
        text = text[:place] + spelling + text[place:]
    return text
