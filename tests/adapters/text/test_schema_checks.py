"""Which alternatives of a ``oneOf`` no value has in common."""

from __future__ import annotations

import pytest

from dflash_adapters.text.schema_checks import has_disjoint_alternatives


def tagged(name: object, required: list[str]) -> dict[str, object]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": required}


@pytest.mark.parametrize(
    ("alternatives", "are_disjoint"),
    [
        ([{"type": "string"}, {"type": "integer"}, {"type": ["null", "object"]}], True),
        ([{"const": 1}, {"const": 2}, {"enum": ["1", None]}], True),
        ([tagged("a", ["kind"]), tagged("b", ["kind"])], True),
        ([{"type": "array"}], True),
        ([{"const": True}, {"const": 1}], True),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": [1]}, {"const": [2]}], False),  # not looked into
        ([tagged("a", ["kind"]), tagged("b", [])], False),
        ([tagged("a", ["kind"]), tagged("a", ["kind"])], False),
        ([{"type": "string"}, {"minLength": 3}], False),
        ([{"type": "string"}, True], False),
        ([{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}], False),
        ({"type": "string"}, False),
    ],
    ids=repr,
)
def test_alternatives_are_disjoint_if_that_can_be_seen(
    alternatives: object, are_disjoint: bool
) -> None:
    assert has_disjoint_alternatives({"oneOf": alternatives}) == are_disjoint
    inner = {"type": "array", "items": {"anyOf": [{"oneOf": alternatives}]}}
    assert has_disjoint_alternatives(inner) == are_disjoint
