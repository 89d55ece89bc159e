"""JSON schemas put together of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

Schema: TypeAlias = "dict[str, Any] | bool"
MOST_ALTERNATIVES = 64


class SchemaRewriter(Protocol):
    """What is used of schema_rewrites.py by modules that each know some keywords."""

    def rewritten(self, schema: Any) -> Any:
        """What allows no more, in words that are known."""

    def others(self, schema: Any) -> list[Schema]:
        """Schemas that allow nothing that `schema` does."""

    def resolved(self, schema: Any) -> Any:
        """What a schema that is a reference leads to."""

    def are_disjoint(self, one: object, other: object) -> bool:
        """Whether it is seen that no value is allowed by both."""

    def take_parts(self, count: int) -> None:
        """Count schemas that are made. Raises: GrammarError for too many."""


def all_of(*schemas: Schema) -> Schema:
    """What all of them allow."""
    parts = [each for each in schemas if each is not True and each != {}]
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def union(schemas: Sequence[Schema]) -> Schema:
    """What one of them allows, of which there is at least one."""
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def finite_values(schema: dict[str, Any]) -> list[object] | None:
    """The only values that a schema may allow; None: not known."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and len(values) <= MOST_ALTERNATIVES else None
