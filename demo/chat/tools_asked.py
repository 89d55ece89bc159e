"""Talks in which tools are offered: called where they help, and not where they do not."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from demo.chat.counting import counting
from demo.chat.facts import CAPITALS, fact, greeting, system_of
from demo.chat.talks import Answer, Message, Talk, user

CITIES = (
    *CAPITALS.values(), "New York", "Hamburg", "Munich", "Milan", "Kyoto", "Bergen", "Boston",
    "Chicago", "Geneva", "Lyon", "Porto", "Sydney", "Toronto", "Zurich", "Istanbul", "Mumbai",
    "Cape Town", "San Francisco", "Los Angeles", "Leipzig", "Turin", "Seville", "Osaka", "Lagos",
)  # fmt: skip
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")


@dataclass(frozen=True)
class _Parameter:
    name: str
    kind: str
    meaning: str


@dataclass(frozen=True)
class _Use:
    """One question that a tool answers."""

    question: str
    arguments: dict[str, Any]
    result: str
    answer: Answer


_PARAMETERS: dict[str, tuple[_Parameter, ...]] = {
    "get_time": (_Parameter("city", "string", "Name of the city"),),
    "get_weather": (_Parameter("city", "string", "Name of the city"),),
    "add": (
        _Parameter("a", "integer", "First number"),
        _Parameter("b", "integer", "Second number"),
    ),
    "multiply": (
        _Parameter("a", "integer", "First number"),
        _Parameter("b", "integer", "Second number"),
    ),
}
_MEANINGS: dict[str, tuple[str, ...]] = {
    "get_time": ("Current time in a city", "The time in a city.", "Get the local time of a city"),
    "get_weather": ("Current weather in a city", "The weather of a city.", "Get the weather"),
    "add": ("Add two numbers", "The sum of two numbers.", "Adds a and b"),
    "multiply": ("Multiply two numbers", "The product of two numbers.", "Multiplies a and b"),
}
TOOL_NAMES = tuple(_PARAMETERS)


def offered(name: str, rng: random.Random) -> Message:
    """A tool as OpenAI's interface has it; what does not matter varies."""
    has_meanings, is_strict = rng.random() < 0.4, rng.random() < 0.2
    properties: dict[str, Any] = {}
    for each in _PARAMETERS[name]:
        kind = "number" if each.kind == "integer" and rng.random() < 0.3 else each.kind
        properties[each.name] = {"type": kind}
        if has_meanings:
            properties[each.name]["description"] = each.meaning
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = [*properties]
    if is_strict:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.9:
        function["description"] = rng.choice(_MEANINGS[name])
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _result(rng: random.Random, key: str, value: Any) -> str:
    if rng.random() < 0.4:
        return json.dumps({key: value})
    return str(value)


def _use(name: str, rng: random.Random) -> _Use:
    if name == "get_time":
        city, time = rng.choice(CITIES), f"{rng.randrange(24):02}:{rng.randrange(60):02}"
        asks = rng.choice(
            ("What time is it in {}?", "What is the time in {}?", "time in {}?", "Which time is it "
             "now in {}?", "Tell me the time in {}.", "How late is it in {}?",
             "Do you know what time it is in {}?", "What's the time in {} right now?")
        )  # fmt: skip
        answer = Answer(f"It is {time} in {city}.", time)
        return _Use(asks.format(city), {"city": city}, _result(rng, "time", time), answer)
    if name == "get_weather":
        city, sky, degrees = rng.choice(CITIES), rng.choice(_SKIES), rng.randrange(-9, 36)
        asks = rng.choice(
            ("How is the weather in {}?", "What is the weather in {}?", "weather in {}?",
             "What's the weather like in {}?", "Tell me the weather in {}.",
             "What is the weather like in {} today?")
        )  # fmt: skip
        shown = f"{sky}, {degrees} degrees"
        answer = Answer(f"It is {shown} in {city}.", shown)
        return _Use(asks.format(city), {"city": city}, _result(rng, "weather", shown), answer)
    a, b = rng.randrange(rng.choice((10, 100, 1000))), rng.randrange(rng.choice((10, 100, 1000)))
    sign, total = ("+", a + b) if name == "add" else ("*", a * b)
    asks = rng.choice(
        ("What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b}", "What is {a} plus {b}?",
         "How much is {a} + {b}?", "Please add {a} and {b}.", "What is the sum of {a} and {b}?")
        if name == "add" else
        ("What is {a} * {b}?", "Multiply {a} by {b}.", "{a} * {b}", "What is {a} times {b}?",
         "How much is {a} * {b}?", "Please multiply {a} and {b}.", "What is {a} x {b}?")
    )  # fmt: skip
    answer = Answer(f"{a} {sign} {b} = {total}.", str(total))
    result = _result(rng, rng.choice(("result", "value")), total)
    return _Use(asks.format(a=a, b=b), {"a": a, "b": b}, result, answer)


def with_tools(rng: random.Random) -> Talk:
    """A talk with one to three offered tools."""
    names = rng.sample(TOOL_NAMES, rng.choice((1, 2, 2, 3)))
    tools = [offered(name, rng) for name in names]
    turns: list[Message | Answer] = [*system_of(rng)]
    if rng.random() < 0.2:
        if "add" in names or rng.random() < 0.7:
            text, answer = (fact if rng.random() < 0.7 else greeting)(rng)
            return Talk("tools not needed", [*turns, user(text), answer], tools)
        return Talk("tools not needed", counting(rng).turns, tools)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(names)
        use = _use(name, rng)
        turns += [
            user(use.question),
            Answer(call=(name, use.arguments)),
            {"role": "tool", "content": use.result},
            use.answer,
        ]
    return Talk("tools", turns, tools)
