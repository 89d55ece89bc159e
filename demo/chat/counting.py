"""Talks with numbers, answered after some reasoning."""

from __future__ import annotations

import random
from collections.abc import Callable

from demo.chat.facts import NAMES, system_of
from demo.chat.talks import Answer, Message, Talk, user

_OBJECTS = ("apples", "books", "coins", "cards", "pens", "stones", "eggs", "keys", "stamps")


def column_sum(a: int, b: int) -> str:
    """How two numbers below 100 are added, digit by digit."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carried = ones // 10
    text = f"Ones: {a % 10} + {b % 10} = {ones}."
    if a >= 10 or b >= 10:
        text += f" Tens: {a // 10} + {b // 10}{' + 1' * carried} = {tens + carried}."
    return f"{text} So {a} + {b} = {a + b}."


def column_difference(a: int, b: int) -> str:
    """How a number is taken from a larger one, both below 100."""
    ones, borrowed = a % 10 - b % 10, 0
    if ones < 0:
        ones, borrowed = ones + 10, 1
    begin = f"{a % 10 + 10 * borrowed} - {b % 10} = {ones}"
    text = f"Ones: {begin}."
    if a >= 10:
        tens = a // 10 - b // 10 - borrowed
        text += f" Tens: {a // 10} - {b // 10}{' - 1' * borrowed} = {tens}."
    return f"{text} So {a} - {b} = {a - b}."


def addition(rng: random.Random) -> tuple[str, Answer]:
    """A sum."""
    a, b = rng.randrange(100), rng.randrange(100)
    asks = rng.choice(
        ("What is {a} + {b}?", "{a} + {b}", "{a} + {b} = ?", "What is {a} plus {b}?",
         "Add {a} and {b}.", "How much is {a} + {b}?", "Calculate {a} + {b}.", "{a}+{b}")
    )  # fmt: skip
    answer = Answer(f"{a} + {b} = {a + b}.", str(a + b), column_sum(a, b))
    return asks.format(a=a, b=b), answer


def subtraction(rng: random.Random) -> tuple[str, Answer]:
    """A difference."""
    b, a = sorted((rng.randrange(100), rng.randrange(100)))
    asks = rng.choice(
        ("What is {a} - {b}?", "{a} - {b}", "What is {a} minus {b}?", "{a} - {b} = ?")
    )
    answer = Answer(f"{a} - {b} = {a - b}.", str(a - b), column_difference(a, b))
    return asks.format(a=a, b=b), answer


def story(rng: random.Random) -> tuple[str, Answer]:
    """A sum or a difference in words."""
    name, things = rng.choice(NAMES), rng.choice(_OBJECTS)
    b, a = sorted((rng.randrange(2, 50), rng.randrange(2, 50)))
    if rng.random() < 0.5:
        verb = rng.choice(("gets", "buys", "finds"))
        text = f"{name} has {a} {things} and {verb} {b} more. How many {things} has {name}?"
        total, steps = a + b, column_sum(a, b)
    else:
        verb = rng.choice(("loses", "sells", "gives away"))
        text = f"{name} has {a} {things} and {verb} {b}. How many {things} are left?"
        total, steps = a - b, column_difference(a, b)
    return text, Answer(f"{total} {things}.", str(total), steps)


def comparison(rng: random.Random) -> tuple[str, Answer]:
    """Which of two numbers is larger."""
    a, b = rng.sample(range(10, 100), 2)
    most = max(a, b)
    if a // 10 == b // 10:
        steps = f"The tens are equal. Ones: {a % 10} and {b % 10}. {most % 10} is more."
    else:
        steps = f"Tens: {a // 10} and {b // 10}. {most // 10} is more."
    asks = rng.choice(("Which is larger, {a} or {b}?", "Is {a} or {b} more?"))
    return asks.format(a=a, b=b), Answer(f"{most} is larger.", str(most), steps)


_MAKERS: tuple[Callable[[random.Random], tuple[str, Answer]], ...] = (
    addition,
    addition,
    subtraction,
    story,
    comparison,
)


def counting(rng: random.Random) -> Talk:
    """One or two questions with numbers."""
    turns: list[Message | Answer] = [*system_of(rng)]
    for _ in range(rng.choice((1, 1, 1, 2))):
        text, answer = rng.choice(_MAKERS)(rng)
        turns += [user(text), answer]
    return Talk("reasoning", turns)
