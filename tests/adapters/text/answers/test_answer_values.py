"""Values of arguments: typed by a schema, or as Python writes them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.text.answers.literals import literal, literal_calls
from dflash_adapters.text.answers.typed import typed


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, ' "a"\n', ' "a"\n'),
        ({"type": "integer"}, " 42\n", 42),
        ({"type": "integer"}, "many", "many"),
        ({"type": "number"}, "-1.5", -1.5),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "array"}, "[1", "[1"),
        ({"type": "object"}, '{"a": {"b": 1}}', {"a": {"b": 1}}),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["null", "string"]}, "none", "none"),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, '"a"', '"a"'),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "5 dollars", "5 dollars"),
        ({"oneOf": [{"anyOf": [{"type": "object"}]}, {"type": "string"}]}, '{"a": 1}', {"a": 1}),
        ({"enum": ["C", "F"]}, "C", "C"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"const": "5"}, "5", "5"),
        ({"enum": [1, None]}, "None", None),
        ({}, "5", 5),
        ({}, "five", "five"),
        (None, "5", 5),
        (7, "[", "["),
        ({"type": 7}, "5", 5),
        ({"type": "integer"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_typed_values(schema: Any, text: str, expected: Any) -> None:
    found = typed(text, {"properties": {"key": schema}}, "key")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("parameters", [{}, {"properties": None}, {"properties": []}])
def test_values_without_a_schema(parameters: dict[str, Any]) -> None:
    assert typed("[1]", parameters, "key") == [1]
    assert typed("[1", parameters, "key") == "[1"


def test_endless_schemas() -> None:
    schema: dict[str, Any] = {}
    schema["anyOf"] = [schema, {"type": "string"}]
    assert typed("5", {"properties": {"key": schema}}, "key") == "5"


VALUES = st.recursive(
    st.text() | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
).filter(lambda value: "inf" not in repr(value))


@given(VALUES)
def test_literals_are_read_as_python_writes_them(value: Any) -> None:
    assert literal(repr(value)) == value
    assert literal_calls(f"[f(a={value!r}), g.h()]") == [("f", {"a": value}), ("g.h", {})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(1, 2)", [1, 2]),
        ("(1)", 1),
        ("(1,)", [1]),
        ("()", []),
        ("[1, 2,]", [1, 2]),
        ("{a: 1, 'b': .5, \"c\": +1.}", {"a": 1, "b": 0.5, "c": 1.0}),
        ('<|"|>a\\n"<|"|>', 'a\\n"'),
        (r'"\x41\u00e9\U0001F600\/\q\\"', "Aé😀/\\q\\"),
    ],
)
def test_literals(text: str, expected: Any) -> None:
    assert literal(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "f()", "1 + 1", "[1 2]", "[,]", "{'a'}", "'a", '<|"|>a', "1 2"),
        *("[" * 65 + "]" * 65, "b'a'", r"'\UFFFFFFFF'", "9" * 5000, "{**a}", "[*a]"),
    ],
)
def test_what_is_no_literal(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        literal(text)


@pytest.mark.parametrize("text", ["[f(1)]", "[f]", "f(a=1", "f(a=g())", "f(**a)", "lambda: 1"])
def test_what_is_no_call(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        literal_calls(text)
